"""The hash by which values are compared: every difference shows."""

from __future__ import annotations

import torch

from zhooks.tensor import hash_of


def test_a_hash_sees_every_bit_every_place_and_every_sign() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(300_001)
    hashes = {hash_of(tensor)}
    for place in (0, 1, 65_536, 131_072, 299_999, 300_000):
        changed = tensor.clone()
        changed.view(torch.int32)[place] ^= 1
        hashes.add(hash_of(changed))
    hashes.add(hash_of(tensor.flip(0)))
    hashes.add(hash_of(-tensor))
    swapped = tensor.clone()
    swapped[[2, 70_000]] = tensor[[70_000, 2]]
    hashes.add(hash_of(swapped))
    assert len(hashes) == 10
    doubles = torch.randn(64, dtype=torch.float64)
    assert hash_of(doubles) != hash_of(-doubles)
    matrix = torch.randn(40, 50)
    assert hash_of(matrix.t().contiguous().t()) == hash_of(matrix) == hash_of(torch.cat([matrix[:1], matrix])[1:])
