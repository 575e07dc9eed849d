# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on loopback: the part of its HTTP interface that the kernels client uses.

Repository information, refs, trees, file downloads and the overview of an organisation, with the
headers and error codes that `huggingface_hub` looks at. Libraries come the way large files come from
the hub: by a redirect to a store of contents, with the true digest in a header.
"""

import contextlib
import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def files_of(folder):
    """Every file below a folder by its path in it, without what Python leaves behind."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _git_blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _is_large(path):
    return path.endswith(".so")


class Hub:
    """Repositories with commits and branches, and a record of what was asked for."""

    def __init__(self, trusted=()):
        self.trusted = set(trusted)  # organisations that the hub marks as trusted publishers
        self.repositories = {}  # repo id -> {"commits": {sha: files}, "branches": {name: sha}}
        self.requests = []  # pairs of method and path
        self.url = None

    def push(self, repo_id, files, *branches):
        """Adds a commit of exactly these files to the branches; returns its hash."""
        digest = hashlib.sha1(repr(sorted(branches)).encode())
        for path, data in sorted(files.items()):
            digest.update(f"{path} {_git_blob(data)}\n".encode())
        commit = digest.hexdigest()
        repository = self.repositories.setdefault(repo_id, {"commits": {}, "branches": {}})
        repository["commits"][commit] = dict(files)
        repository["branches"].update(dict.fromkeys(branches, commit))
        return commit

    @contextlib.contextmanager
    def running(self):
        """Serves on a free port of the loopback interface."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Missing(Exception):
    """A 404 with the code by which the client tells the cases apart."""

    def __init__(self, code, headers=()):
        super().__init__(code)
        self.headers = {"X-Error-Code": code, **dict(headers)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def do_GET(self):
        """Answers with a body."""
        self._respond(body=True)

    def do_HEAD(self):
        """Answers the same without the body."""
        self._respond(body=False)

    def log_message(self, format, *arguments):
        """Keeps the record in the hub and not on the screen."""

    def _respond(self, body):
        url = urllib.parse.urlsplit(self.path)
        self.hub.requests.append((self.command, url.path))
        query = dict(urllib.parse.parse_qsl(url.query))
        parts = url.path.strip("/").split("/")
        try:
            status, headers, data = self._route(parts, query)
        except _Missing as missing:
            status, headers, data = 404, missing.headers, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _route(self, parts, query):
        if parts[:2] == ["api", "organizations"] and parts[3:] == ["overview"]:
            name = parts[2]
            return _json(
                {"name": name, "fullname": name, "avatarUrl": ""}
                | ({"trustedKernelPublisher": True} if name in self.hub.trusted else {})
            )
        if parts[0] == "contents":
            return self._contents(parts[1])
        if parts[0] == "api" and parts[1] in ("kernels", "models"):
            return self._api("/".join(parts[2:4]), parts[4:], query)
        # Kernels have a prefix of their own, models have none.
        parts = parts[1:] if parts[0] == "kernels" else parts
        if parts[2:3] == ["resolve"]:
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        raise _Missing("EntryNotFound")

    def _commit(self, repo_id, revision):
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            raise _Missing("RepoNotFound")
        name = urllib.parse.unquote(revision).removeprefix("refs/heads/")
        commit = repository["branches"].get(name, name)
        if commit not in repository["commits"]:
            raise _Missing("RevisionNotFound")
        return commit, repository["commits"][commit]

    def _api(self, repo_id, rest, query):
        if rest == ["refs"]:
            self._commit(repo_id, "main")
            branches = self.hub.repositories[repo_id]["branches"].items()
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
                for name, sha in branches
            ]
            return _json({"branches": refs, "converts": [], "tags": []})
        if rest[:1] == ["tree"]:
            _, files = self._commit(repo_id, rest[1])
            folder = urllib.parse.unquote("/".join(rest[2:]))
            return _json(_tree(files, folder, query.get("recursive", "").lower() == "true"))
        if rest == [] or rest[:1] == ["revision"]:
            commit, _ = self._commit(repo_id, rest[1] if rest else "main")
            return _json({"id": repo_id, "author": repo_id.split("/")[0], "sha": commit})
        raise _Missing("EntryNotFound")

    def _file(self, repo_id, revision, path):
        commit, files = self._commit(repo_id, revision)
        headers = {"X-Repo-Commit": commit}
        path = urllib.parse.unquote(path)
        if path not in files:
            raise _Missing("EntryNotFound", headers)
        data = files[path]
        if not _is_large(path):
            return 200, {**headers, "ETag": f'"{_git_blob(data)}"'}, data
        digest = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        # Another host name, as the hub's store has one: the client must not follow with HEAD.
        store = self.hub.url.replace("127.0.0.1", "localhost")
        return 302, {**headers, **linked, "Location": f"{store}/contents/{digest}"}, b""

    def _contents(self, digest):
        for repository in self.hub.repositories.values():
            for files in repository["commits"].values():
                for path, data in files.items():
                    if _is_large(path) and hashlib.sha256(data).hexdigest() == digest:
                        return 200, {"ETag": f'"{digest}"'}, data
        raise _Missing("EntryNotFound")


def _tree(files, folder, recursive):
    """Entries below a folder as the hub lists them: folders by the hash of what is in them."""
    prefix = folder + "/" if folder else ""
    inside = {path: data for path, data in files.items() if path.startswith(prefix)}
    if not inside:
        raise _Missing("EntryNotFound")
    folders, entries = {}, []
    for path, data in inside.items():
        steps = path[len(prefix) :].split("/")[:-1]
        for depth in range(1, len(steps) + 1):
            name = prefix + "/".join(steps[:depth])
            folders.setdefault(name, hashlib.sha1()).update(data)
        if recursive or not steps:
            entry = {"type": "file", "path": path, "size": len(data), "oid": _git_blob(data)}
            if _is_large(path):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
            entries.append(entry)
    for name, digest in folders.items():
        if recursive or "/" not in name[len(prefix) :]:
            entry = {"type": "directory", "path": name, "size": 0, "oid": digest.hexdigest()}
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry["path"])


def _json(value):
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
