"""Vocabulary parallel: ranks that each own a slice of the ids give what one rank gives."""

import os
from itertools import pairwise

import pytest
import torch
from paperlm_kernels.cross_entropy import vocab_slice
from support_cross_entropy import CPU, Place, relative
from support_cross_entropy_parallel import CASES, case_problem, rank_main, results

# One worker starts the ranks once; elsewhere they would start again for their share of the cases.
pytestmark = pytest.mark.xdist_group("ranks")


def places():
    """(place, ranks) that can run here: processes on the CPU, and as many GPUs as there are."""
    found = [(CPU, 2), (CPU, 4), (Place("reference", "cpu", torch.bfloat16), 2)]
    if os.environ.get("TRITON_INTERPRET") == "1":
        found.append((Place("triton", "cpu", torch.float32), 2))
    if torch.cuda.device_count() >= 2:
        cards = 4 if torch.cuda.device_count() >= 4 else 2
        found.append((Place("triton", "cuda", torch.bfloat16), cards))
    return found


@pytest.fixture(scope="module", params=places(), ids=lambda p: f"{p[0]}-{p[1]}")
def ranks(request, tmp_path_factory):
    """Where it ran, and what each rank found."""
    place, world = request.param
    folder = tmp_path_factory.mktemp("ranks")
    # Forks start at once, but where there is a GPU autograd has threads by then, which do not survive one.
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(rank_main, (world, place, str(folder)), nprocs=world, start_method=method)
    return place, [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_equal_one_rank(ranks, case):
    place, found = ranks
    p, keywords = case_problem(place, case)
    loss, lse, d_hidden, *own = results(p, backend=place.backend, **keywords)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(place.dtype, 5e-3)
    stops = []
    for rank in found:
        (start, stop), (loss_r, lse_r, d_hidden_r, *own_r) = rank[case]
        torch.testing.assert_close(loss_r, loss, rtol=min(bound, 1e-5), atol=0)
        torch.testing.assert_close(lse_r, lse, rtol=min(bound, 1e-5), atol=min(bound, 1e-5))
        assert torch.equal(loss_r, found[0][case][1][0]) and torch.equal(d_hidden_r, found[0][case][1][2])
        assert relative(d_hidden_r, d_hidden) <= bound
        for mine, whole in zip(own_r, own, strict=True):
            assert mine.shape == whole[start:stop].shape and mine.dtype == whole.dtype
            assert start == stop or relative(mine, whole[start:stop]) <= bound
        stops.append((start, stop))
    assert stops[0][0] == 0 and stops[-1][1] == p.weight.shape[0]
    assert all(a[1] == b[0] for a, b in pairwise(stops))


def test_the_filter_leaves_tiles_out_in_the_case_that_filters():
    p, keywords = case_problem(CPU, "filtered")
    filtered, exact = (results(p, **{**keywords, "filter_eps": eps}) for eps in (keywords["filter_eps"], None))
    assert relative(filtered[3], exact[3]) > 1e-3


def test_slices_and_tensors_that_do_not_fit_are_refused(ranks):
    _, found = ranks
    for rank in found:
        errors = rank["errors"]
        assert "vocab_slice(rank, world, V)" in errors["no range"] and "(0, 301)" in errors["wrong range"]
        assert "holds the whole vocabulary" in errors["dense"]
        assert "target id 301 at [0, 0] is not in [0, 301)" in errors["id"]
        assert "TypeError: weight is a DTensor" in errors["dtensor"] and "vocab_range" in errors["dtensor"]


@pytest.mark.parametrize("vocab,world", [(8, 3), (301, 4), (3, 4), (0, 2), (256, 1)])
def test_slices_cover_the_vocabulary_and_differ_by_one_at_most(vocab, world):
    slices = [vocab_slice(rank, world, vocab) for rank in range(world)]
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(vocab))
    lengths = [stop - start for start, stop in slices]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(ValueError, match="rank 2 is not one of a group of 2"):
        vocab_slice(2, 2, 10)
