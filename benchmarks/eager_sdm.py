# SPDX-License-Identifier: Apache-2.0
"""The yardstick: chunked sparse delta memory in eager PyTorch, with autograd for the backward.

The mathematics of docs/semantics.md as one would write it without a kernel: everything that does not
depend on the bank (decays, pairs of entries with a common slot, the triangular inverse) is computed
for all chunks and streams at once, and a loop over chunks gathers rows, multiplies and updates.
No loop over tokens or streams. The bank is updated in place, which autograd allows because gathers
keep indices only. In a training call each chunk takes one copy of the rows that it touches, so that
autograd makes one dense bank gradient a chunk and not five. Two ways to sum weighted rows:

- `bags=False`: index and multiply, as most would write it;
- `bags=True`: `embedding_bag`, which writes out neither the gathered rows nor the updates.

Slots of one token must be distinct, every id must lie in the bank, and T be a multiple of the chunk.
"""

import torch
from torch.nn.functional import embedding_bag


def eager_chunk_sdm(
    write_idx,
    write_val,
    v,
    beta,
    g,
    read_idx,
    read_val,
    initial_state,
    *,
    chunk_size=64,
    bags=True,
):
    """Return `(out, final_state)` like `chunk_sdm(..., output_final_state=True)`."""
    bank = initial_state.expand(v.shape[0], *initial_state.shape[-3:]).clone()
    tokens = (write_idx, write_val, v, beta, g, read_idx, read_val)
    out = eager_chunk_sdm_(bank, *tokens, chunk_size=chunk_size, bags=bags)
    return out, bank


def eager_chunk_sdm_(
    state,
    write_idx,
    write_val,
    v,
    beta,
    g,
    read_idx,
    read_val,
    *,
    chunk_size=64,
    bags=True,
):
    """Advance `state [B, H, S, D]` (contiguous) in place and return the readings."""
    batch, length, heads, dim = v.shape
    streams, num_slots = batch * heads, state.shape[2]
    if length % chunk_size:
        raise ValueError(f"T = {length} must be a multiple of the chunk, {chunk_size}")

    def chunked(x):
        """[B, T, H, ...] -> [chunks, streams, C, ...]."""
        x = x.reshape(batch, length // chunk_size, chunk_size, heads, *x.shape[3:])
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    write_idx, write_val, values, beta, g, read_idx, read_val = map(
        chunked, (write_idx, write_val, v, beta, g, read_idx, read_val)
    )
    write_val, values, beta, read_val = (x.float() for x in (write_val, values, beta, read_val))
    log_decay = (g if g.dim() == 4 else g.unsqueeze(-1)).expand(write_idx.shape)
    plan = _Plan(write_idx, write_val, log_decay, read_idx, read_val, num_slots)
    # (I + A diag(beta)) e = v - retrieved: the inverse of all chunks at once.
    eye = torch.eye(chunk_size, device=v.device).expand_as(plan.gram)
    inverse = torch.linalg.solve_triangular(
        plan.gram * beta.unsqueeze(-2), eye, upper=False, unitriangular=True
    )
    mix = plan.read_gram * beta.unsqueeze(-2)

    rows_of_bank = state.view(-1, dim)
    # A copy of the touched rows: for autograd (above), or to convert no more than those.
    copies = (
        state.dtype != torch.float32
        or torch.is_grad_enabled()
        and any(x.requires_grad for x in (state, write_val, values, beta, g, read_val))
    )
    weighted_sum = _bag_sum if bags else _gather_sum
    outputs = []
    for n in range(values.shape[0]):
        written = plan.written_slots[n]
        if copies:
            rows = rows_of_bank.index_select(0, plan.touched_slots[n]).float()
            write_rows, read_rows = plan.write_local[n], plan.read_local[n]
            old = rows.index_select(0, plan.written_local[n])
        else:
            rows = rows_of_bank
            write_rows, read_rows = plan.write_slots[n], plan.read_slots[n]
            old = rows.index_select(0, written)
        retrieved = weighted_sum(rows, write_rows, plan.write[n])
        inter = weighted_sum(rows, read_rows, plan.read[n])
        errors = inverse[n] @ (values[n] - retrieved.view(streams, -1, dim))
        outputs.append(torch.baddbmm(inter.view(streams, -1, dim), mix[n], errors))
        deltas = (beta[n].unsqueeze(-1) * errors).flatten(0, 1)
        decay = plan.decay[n].unsqueeze(-1)
        if bags:
            change = embedding_bag(
                plan.post_token[n], deltas, plan.post_offsets[n],
                per_sample_weights=plan.post[n], mode="sum",
            )  # fmt: skip
            new = torch.addcmul(change, decay, old)
        else:
            changes = plan.post[n].unsqueeze(-1) * deltas[plan.post_token[n]]
            new = (decay * old).index_add(0, plan.post_group[n], changes)
        rows_of_bank.index_copy_(0, written, new.to(state.dtype))
    out = torch.stack(outputs).unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, length, heads, dim).to(v.dtype)


class _Plan:
    """What a chunk needs besides the bank; inputs are [chunks, streams, C, lanes].

    An entry is one (token, lane); the entries of a (chunk, stream) with the same slot are a group,
    and sorting by slot (stable, writes before reads in a token) makes groups contiguous and puts
    their entries in the order of execution.
    """

    def __init__(self, write_idx, write_val, log_decay, read_idx, read_val, num_slots):
        chunks, streams, size, lanes = write_idx.shape
        device = write_idx.device
        count = lanes + read_idx.shape[-1]
        flat = (chunks * streams, size * count)

        slots = torch.cat([write_idx, read_idx], -1).long()
        slots = slots + num_slots * torch.arange(streams, device=device).view(-1, 1, 1)
        slots, order = slots.view(flat).sort(dim=-1, stable=True)
        is_write = order % count < lanes
        token = order // count
        position = torch.arange(slots.numel(), device=device)
        first = torch.ones(flat, dtype=torch.bool, device=device)
        first[:, 1:] = slots[:, 1:] != slots[:, :-1]
        first = first.flatten()
        group = first.cumsum(0) - 1
        start = position[first]
        end = torch.cat([start[1:], position.new_tensor([position.numel()])]) - 1

        # Log decays summed inside the groups, in float64: L up to an entry, E after it.
        x = torch.cat([log_decay, log_decay.new_zeros(read_idx.shape)], -1)
        x = x.reshape(flat).gather(1, order).flatten().double()
        total = x.cumsum(0)
        before = (total - x)[start]
        up_to = total - before[group]
        whole = total[end] - before
        weight = torch.cat([write_val, read_val], -1).reshape(flat).gather(1, order).flatten()
        initial = weight * up_to.exp().float()

        # Back in token order: the weights and rows of every token's sum over chunk-initial rows.
        back = order.argsort(dim=-1)

        def by_token(y):
            y = y.view(flat).gather(1, back).view(chunks, streams * size, count)
            return y[..., :lanes].contiguous(), y[..., lanes:].contiguous()

        self.write, self.read = by_token(initial)
        self.write_slots, self.read_slots = by_token(slots)
        starts = group.view(chunks, -1)[:, 0]
        local = (group.view(chunks, -1) - starts.unsqueeze(1)).flatten()
        self.write_local, self.read_local = by_token(local)
        group_slot = slots.flatten()[start]
        group_chunk = start // (streams * flat[1])
        self.touched_slots = _split(group_slot, group_chunk, chunks)

        # The update: one bag of writes for each written slot.
        is_write = is_write.flatten()
        write_group, writes = group[is_write].unique_consecutive(return_counts=True)
        write_chunk = group_chunk[write_group]
        self.written_slots = _split(group_slot[write_group], write_chunk, chunks)
        self.written_local = _split(local[start[write_group]], write_chunk, chunks)
        self.decay = _split(whole[write_group].exp().float(), write_chunk, chunks)
        entry_chunk = position[is_write] // (streams * flat[1])
        post = weight * (whole[group] - up_to).exp().float()
        stream = torch.arange(chunks * streams, device=device).view(-1, 1) % streams
        stream_token = (token + size * stream).flatten()
        self.post = _split(post[is_write], entry_chunk, chunks)
        self.post_token = _split(stream_token[is_write], entry_chunk, chunks)
        offsets = writes.cumsum(0) - writes - write_chunk * (streams * size * lanes)
        bag = torch.arange(writes.numel(), device=device).repeat_interleave(writes)
        bags_before = write_chunk.bincount(minlength=chunks).cumsum(0)
        bags_before = torch.cat([bags_before.new_zeros(1), bags_before])
        self.post_group = _split(bag - bags_before[entry_chunk], entry_chunk, chunks)
        self.post_offsets = _split(offsets, write_chunk, chunks)

        # Pairs (earlier write, later entry) of a group, summed into the two Gram matrices.
        rank = position - start[group]
        later = position.repeat_interleave(rank)
        earlier = start[group[later]] + (
            torch.arange(later.numel(), device=device) - (rank.cumsum(0) - rank)[later]
        )
        token = token.flatten()
        used = is_write[earlier] & (~is_write[later] | (token[earlier] < token[later]))
        later, earlier = later[used], earlier[used]
        pair = weight[later] * weight[earlier] * (up_to[later] - up_to[earlier]).exp().float()
        matrix = later // flat[1] + is_write[later].logical_not() * flat[0]
        cell = (matrix * size + token[later]) * size + token[earlier]
        grams = pair.new_zeros(2 * flat[0] * size * size).index_add(0, cell, pair)
        self.gram, self.read_gram = grams.view(2, chunks, streams, size, size)


def _bag_sum(rows, ids, weights):
    return embedding_bag(ids, rows, per_sample_weights=weights, mode="sum")


def _gather_sum(rows, ids, weights):
    return (weights.unsqueeze(-2) @ rows[ids]).squeeze(-2)


def _split(x, chunk, chunks):
    """Cut `x`, whose items belong to ascending `chunk`s, into one piece a chunk."""
    return x.split(chunk.bincount(minlength=chunks).tolist())


def eager_recurrent_sdm_(state, write_idx, write_val, v, beta, g, read_idx, read_val):
    """One token (T = 1) on `state [B, H, S, D]` in place: the decode step without a kernel."""
    batch, _, heads, dim = v.shape
    rows = state.view(-1, dim)
    first = state.shape[2] * torch.arange(batch * heads, device=v.device).view(batch, heads, 1)
    write, read = write_idx[:, 0] + first, read_idx[:, 0] + first
    decay = g[:, 0].exp() if g.dim() == 4 else g[:, 0].exp().unsqueeze(-1)
    old = rows[write] * decay.unsqueeze(-1)  # [B, H, W, D]
    retrieved = (write_val[:, 0].unsqueeze(-2) @ old).squeeze(-2)
    delta = beta[:, 0].unsqueeze(-1) * (v[:, 0] - retrieved)
    new = torch.addcmul(old, write_val[:, 0].unsqueeze(-1), delta.unsqueeze(-2))
    rows.index_copy_(0, write.flatten(), new.view(-1, dim))
    out = embedding_bag(
        read.view(-1, read.shape[-1]), rows, mode="sum",
        per_sample_weights=read_val[:, 0].reshape(-1, read.shape[-1]),
    )  # fmt: skip
    return out.view(batch, 1, heads, dim)


def eager_product_key_topk(scores, factor_dims, k):
    """Two factors: top-k of each, all pair sums, top-k of those, ascending ids."""
    left, right = scores.split(list(factor_dims), -1)
    left, left_id = left.topk(min(k, factor_dims[0]), -1)
    right, right_id = right.topk(min(k, factor_dims[1]), -1)
    sums = (left.unsqueeze(-1) + right.unsqueeze(-2)).flatten(-2)
    ids = (left_id.unsqueeze(-1) * factor_dims[1] + right_id.unsqueeze(-2)).flatten(-2)
    values, place = sums.topk(k, -1)
    ids, order = ids.gather(-1, place).sort(-1)
    return values.gather(-1, order), ids
