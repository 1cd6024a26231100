"""Other people's codecs of weights: what stands around them, and when they count as absent or wrong."""

from __future__ import annotations

import heapq
import sys
import types
import zlib

import numpy as np
import pytest
import torch
from paperlm_kernels.bench import ops
from paperlm_kernels.bench import peers as absence
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.ops.neuzip import gaps, methods, peers, planes, task
from support_neuzip import bits_of, compiled_or_interpreted, every_pattern, gaussian

END = 256


def huffman(counts):
    """Symbol -> bits and code word, by merging the two rarest."""
    heap = [(n, i, (symbol,)) for i, (symbol, n) in enumerate(sorted(counts.items()))]
    heapq.heapify(heap)
    codes = dict.fromkeys(counts, (0, 0))
    while len(heap) > 1:
        (n, _, left), (m, i, right) = heapq.heappop(heap), heapq.heappop(heap)
        for symbols, bit in ((left, 0), (right, 1)):
            codes |= {s: (codes[s][0] + 1, codes[s][1] | bit << codes[s][0]) for s in symbols}
        heapq.heappush(heap, (n + m, i, left + right))
    return codes


def decoded(streams, codes, count):
    """What each thread decodes by itself: from its gap on, all symbols that begin in its 64 bits, into its block."""
    bits = np.unpackbits(streams.encoded.numpy())
    starts = np.packbits(np.pad(np.unpackbits(streams.gaps.numpy()).reshape(-1, 5), ((0, 0), (3, 0))), axis=1)[:, 0]
    symbols = {(size, word): symbol for symbol, (size, word) in codes.items()}
    out = np.full(count, -1)
    for block, place in enumerate(streams.positions.tolist()[:-1]):
        for thread in range(block * gaps.THREADS, (block + 1) * gaps.THREADS):
            at = thread * 64 + int(starts[thread])
            while at < min((thread + 1) * 64, len(bits)) and place < count:
                size = word = 0
                while (size, word) not in symbols:
                    size, word = size + 1, word << 1 | int(bits[at + size])
                out[place] = symbols[size, word]
                place, at = place + 1, at + size
        assert place == streams.positions[block + 1]
    return out


@pytest.mark.parametrize("count", [1, 33, 12_000, 40_001, 40_002, 40_003])
@pytest.mark.parametrize("part", [2**24, 777])
def test_each_thread_finds_its_symbols_by_its_gap_and_its_blocks_position(count, part, monkeypatch):
    monkeypatch.setattr(gaps, "PART", part)
    exponents = ((bits_of(gaussian(count, count)) >> 7) & 255).astype(np.uint8)
    counts = dict(zip(*(a.tolist() for a in np.unique(exponents, return_counts=True)), strict=True))
    codes = huffman(counts | {END: 1})
    found = gaps.streams(torch.from_numpy(exponents), {s: c for s, c in codes.items() if s != END}, codes[END])
    assert (decoded(found, codes, count) == exponents).all()
    size = sum(codes[s][0] * n for s, n in counts.items())
    assert len(found.encoded) == -(-size // 8)
    blocks = -(-len(found.encoded) // 4096)
    assert len(found.positions) == blocks + 1 and len(found.gaps) == blocks * 320  # 512 gaps of 5 bits


def test_code_words_of_32_bits_are_laid_over_the_ends_of_words():
    codes = {7: (32, 0x80000001), 9: (1, 0), 11: (31, 0x7FFFFFFF)}
    symbols = [9, 7, 11, 9, 9, 7, 7]
    found = gaps.streams(torch.tensor(symbols, dtype=torch.uint8), codes, (3, 0b101))
    text = "".join(f"{codes[s][1]:0{codes[s][0]}b}" for s in symbols)
    text += "101"[: -len(text) % 8].ljust(-len(text) % 8, "0")
    assert found.encoded.tolist() == [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]


@compiled_or_interpreted
@pytest.mark.parametrize("count", [65536, planes.BLOCK + 1, 5])
def test_every_pattern_is_parted_into_two_bytes_and_merged_again(spot, count):
    weights = every_pattern()[:count].to(spot.device)
    exponents, items = planes.split(weights)
    bits = torch.from_numpy(bits_of(weights.cpu()).astype(np.int32))
    assert torch.equal(exponents.cpu().int(), (bits >> 7) & 255)
    assert torch.equal(items.cpu().int(), ((bits >> 15) << 7) | (bits & 127))
    got = planes.merge(exponents, items, torch.zeros_like(weights))
    assert torch.equal(got.view(torch.int16), weights.view(torch.int16))


def test_a_peer_whose_other_packages_are_missing_says_which(monkeypatch):
    monkeypatch.setattr(absence, "version", lambda package: "1.0")
    monkeypatch.setattr(absence, "_found", lambda module: module == "dahuffman")
    assert peers.DFloat11.absent("cuda") == "dfloat11 needs cupy besides, which cannot be imported: install it"
    assert "nvidia.nvcomp and nvidia.libnvcomp" in peers.NvComp13.absent("cuda")
    assert peers.DFloat11.absent("cpu") == "needs a CUDA GPU"


def test_a_module_of_a_package_that_is_not_there_is_not_found():
    assert not absence._found("no_such_package.inner") and not absence._found("no_such_package")
    assert absence._found("importlib.util")


def test_a_codec_of_the_cpu_is_not_timed_for_a_card_and_the_namesake_is_never_imported():
    assert peers.ZipNN.absent("cuda") == "codes on a CPU: ask for --device cpu"
    assert "another's: put its file codec_gpu.py" in peers.SplitZip.absent("cuda") and "splitzip" not in sys.modules


def test_zipnn_packs_the_bytes_of_a_file_in_one_thread(tmp_path, monkeypatch):
    class Codec:
        def __init__(self, threads):
            assert threads == 1

        def compress(self, data):
            return zlib.compress(data)

        def decompress(self, data):
            return zlib.decompress(data)

    monkeypatch.setitem(sys.modules, "zipnn", types.SimpleNamespace(ZipNN=Codec))
    plain, packed, again = (tmp_path / name for name in "abc")
    plain.write_bytes(bytes(1000))
    coder = peers.ZipNN(types.SimpleNamespace(case=None))
    coder.pack_file(plain, packed)
    coder.unpack_file(packed, again)
    assert packed.stat().st_size < 100 and again.read_bytes() == plain.read_bytes()


def test_splitzip_is_the_file_of_its_repository_and_another_file_of_that_name_is_not_taken_for_it(
    tmp_path, monkeypatch
):
    (tmp_path / "codec_gpu.py").write_text(
        "class ChunkLocalSplitZipGPU:\n"
        "    def __init__(self, device, chunk_size): self.asked = (device, chunk_size)\n"
        "    def calibrate(self, weights): self.seen = len(weights)\n"
        "    def encode(self, weights):\n"
        "        return type('Encoded', (), {'compressed_bytes': 60, 'weights': weights})()\n"
        "    def decode(self, encoded): return encoded.weights\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "codec_gpu", raising=False)
    assert peers.SplitZip.absent("cuda") is None and peers.SplitZip.absent("cpu") == "needs a CUDA GPU"
    weights = gaussian(40)
    inputs = types.SimpleNamespace(case=types.SimpleNamespace(weights=40), device=torch.device("cpu"), weights=weights)
    coder = peers.SplitZip(inputs)
    assert coder.codec.asked == ("cpu", 1024) and coder.codec.seen == 40
    assert coder.decode(coder.stored(), None) is weights and coder.bits_of(coder.stored()) == 8 * 60 / 40
    monkeypatch.setitem(sys.modules, "codec_gpu", types.SimpleNamespace(__file__="codec_gpu.py"))
    with pytest.raises(absence.AbsentError, match="no ChunkLocalSplitZipGPU"):
        peers.SplitZip(inputs)


def test_nvcomp_is_asked_for_chunks_of_64_kib_and_its_bits_hold_both_planes(monkeypatch):
    asked = {}
    library = types.SimpleNamespace(Codec=lambda **options: asked.update(options))
    nvidia = types.SimpleNamespace(nvcomp=library)
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: types.SimpleNamespace(cuda_stream=5, device_index=0))
    inputs = types.SimpleNamespace(case=types.SimpleNamespace(weights=80), device=torch.device("cpu"))
    coder = peers.NvComp13(inputs)
    assert (asked["algorithm"], asked["uncomp_chunk_size"], asked["cuda_stream"]) == ("ANS", 65536, 5)
    stored = peers.AnsStored(types.SimpleNamespace(buffer_size=30), None, torch.zeros(80, dtype=torch.uint8))
    assert coder.bits_of(stored) == 8 * 110 / 80


def test_a_codec_that_loses_a_bit_it_should_keep_gives_no_number(monkeypatch):
    class Wrong(methods.Copy):
        def decode(self, stored, out):
            got = super().decode(stored, out)
            got[3] = -got[3]
            return got

    monkeypatch.setitem(methods.METHODS, "copy", Wrong)
    given = Task("neuzip", "cpu_w2e20", "copy", ("decode", "bits"), small=True, device="cpu")
    (row,) = task.rows_of(ops.operation("neuzip"), given)
    assert row["outcome"] == "failed: 1 of 131072 weights are not decoded to their bits"
