# SPDX-License-Identifier: Apache-2.0
"""Wrappers and tensors of torch.distributed, in one process: the same values as without them."""

import copy

import pytest
import torch
import torch.distributed as dist

from .helpers.cases import FLOATS, Case, make
from .helpers.compare import assert_same_bits
from .helpers.plain_mixer import config_of, randomize

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def step(mixer, x):
    y, _ = mixer(x)
    y.square().sum().backward()
    return y.detach(), [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in mixer.parameters()
    ]


@pytest.mark.parametrize("wrapper", ["data parallel", "fully sharded"])
def test_wrapped_mixer(sdm, mesh, wrapper):
    mixer = randomize(sdm.SparseDeltaMemory(config_of(sdm)))
    x = torch.randn(2, 21, 24)
    expected = step(copy.deepcopy(mixer), x)
    bank = mixer.initial_bank().detach()
    if wrapper == "data parallel":
        wrapped = mixer = torch.nn.parallel.DistributedDataParallel(mixer)
    else:
        wrapped = dist.fsdp.fully_shard(mixer, mesh=mesh)
        assert_same_bits(mixer.init_state(2).bank, bank.expand(2, *bank.shape))
    assert_same_bits(step(wrapped, x), expected)


def test_local_parts_of_distributed_tensors(sdm, mesh):
    """The recipe of docs/semantics.md; without it torch says that there is no sharding strategy."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    rows, bank = [Shard(0)], [Replicate()]
    inputs = make(Case("distributed")).map(lambda x: x.requires_grad_(), FLOATS)
    chunk = local_map(
        lambda *args: sdm.chunk_sdm(*args)[0],
        out_placements=rows,
        in_placements=(*[rows] * 7, bank),
        device_mesh=mesh,
    )
    placements = [*[rows] * 7, bank]
    arguments = [DTensor.from_local(x, mesh, p) for x, p in zip(inputs.args(), placements)]
    out = chunk(*arguments).full_tensor()
    plain, _ = sdm.chunk_sdm(*inputs.args())
    assert_same_bits(out.detach(), plain.detach())
    leaves = [getattr(inputs, name) for name in FLOATS]
    got = torch.autograd.grad(out.square().sum(), leaves)
    assert_same_bits(got, torch.autograd.grad(plain.square().sum(), leaves))
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        sdm.chunk_sdm(*arguments)
