# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/dev_build.py; standard library only, so that they run on a bare machine."""
