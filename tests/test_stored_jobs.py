"""Jobs about weights that are stored in fewer bits: entropies, perplexity, speed."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paperlm_kernels.neuzip import ContainerError, decode_errors
from paperlm_kernels.stored import stored_weights, weight_bytes
from pydantic import ValidationError
from support import smoke_run
from support_engine import trained
from support_stored import TABLES

from paperlm.data.texts import prepare_text
from paperlm.errors import JobError
from paperlm.evaluate.drawn import model_of
from paperlm.evaluate.stores import counted, put_into_stores
from paperlm.evaluate.windows import mean_losses, windows_of
from paperlm.jobs import job_kinds, stored_speed
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.normal_entropy import NormalEntropy, normal_shares
from paperlm.jobs.perturbed_perplexity import PerturbedPerplexity
from paperlm.jobs.stored_bytes import StoredBytes
from paperlm.jobs.stored_perplexity import StoredPerplexity
from paperlm.jobs.stored_speed import StoredSpeed, iteration, rate_of, timed
from paperlm.jobs.weight_entropy import WeightEntropy
from paperlm.plan.project import Project

QUIET = Machine(device="cpu", progress=False)
WIDE = {"hidden_size": 192, "intermediate_size": 256, "n_heads": 4, "n_layers": 2, "norm": {"name": "pre_ln"}}
TEXT = {"text": "bundled:c4_sample", "documents": 4, "window": 32}


def wide(**changes):
    return smoke_run(**WIDE | {"peak_lr": 3e-3} | changes)


@pytest.fixture(scope="module")
def model(manifest, tmp_path_factory):
    """The folder of a model whose matrices are large enough to be coded, as it is and before its training."""
    folder = tmp_path_factory.mktemp("model")
    trained(wide(), manifest, folder, keep=(0,))
    return folder / "model"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    data = StoredPerplexity(of=wide(), store="plain", **TEXT).data()[0]
    return prepare_text(data, tmp_path_factory.mktemp("text"))


def made(job, folder, data=()):
    run = __import__(f"paperlm.jobs.{job.kind}", fromlist=["run"]).run
    return run(job, Inputs(data=data, models={"of": folder}, work=folder), QUIET)


def perplexity(model, text, **settings):
    return made(StoredPerplexity(of=wide(), **TEXT, **settings), model, (text,))


def test_the_entropies_of_a_normal_distribution_are_those_of_the_paper():
    found = made(NormalEntropy(std=0.02), None).metrics
    expected = {"sign": 1.0, "exponent": 2.5453, "mantissa": 6.9716, "joint": 10.464}
    assert all(found[name] == pytest.approx(value, abs=5e-4) for name, value in expected.items())
    assert found["ratio_sum"] == pytest.approx(1.5214, abs=1e-4)
    assert found["ratio_joint"] == pytest.approx(1.5291, abs=1e-4)


def test_shares_are_those_of_numbers_that_are_drawn():
    shares = normal_shares(0.02)
    assert shares.sum() == pytest.approx(1.0, abs=1e-12)
    drawn = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    counts = np.bincount(drawn.view(torch.int16).numpy().view(np.uint16), minlength=2**16) / len(drawn)
    assert np.abs(counts - shares).sum() < 0.05


def test_the_entropies_of_fresh_weights_are_close_to_the_distributions(model):
    found = made(WeightEntropy(of=wide(), at="init"), model / "at-0")
    assert found.metrics["exponent"] == pytest.approx(2.545, abs=0.01)
    assert found.metrics["weights"] == 2 * (4 * 192**2 + 3 * 192 * 256)
    shares = {}
    for field, _, share in found.series["histogram"].rows:
        shares[field] = shares.get(field, 0.0) + share
    assert all(value == pytest.approx(1.0, abs=1e-3) for value in shares.values()) and len(shares) == 3


def test_without_loss_every_window_has_the_loss_of_the_plain_model(model, text):
    plain, packed = perplexity(model, text, store="plain"), perplexity(model, text, store="packed")
    assert packed.metrics["losses_hash"] == plain.metrics["losses_hash"]
    assert packed.metrics["weight_bytes"] < plain.metrics["weight_bytes"]
    tables = 8 * 14 * TABLES / (2 * (4 * 192**2 + 3 * 192 * 256))  # seven matrices a block
    assert plain.metrics["bits_per_weight"] == 16 and 10.5 < packed.metrics["bits_per_weight"] - tables < 12


def test_perplexity_by_words_is_that_of_the_papers_program(model, text):
    found = perplexity(model, text, store="plain")
    losses, words = found.series["windows"].column("mean_loss"), found.metrics["words"]
    assert found.metrics["word_perplexity"] == pytest.approx(math.exp(sum(losses) * 32 / words), rel=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert found.metrics["tokens"] == 31 * len(losses), "the first of each window is given and not predicted"


def test_a_model_whose_losses_are_no_numbers_has_no_perplexity(model, text, monkeypatch):
    from paperlm.evaluate import windows

    monkeypatch.setattr(windows, "mean_losses", lambda _, them, *__: [math.nan, *[1.0] * (len(them) - 1)])
    found = perplexity(model, text, store="plain")
    assert found.outcome == "blocked" and "no finite numbers" in found.reason and not found.metrics


class Counting(torch.nn.Module):
    """Of 4 tokens the next number follows with probability 1/2, each of the others with 1/6."""

    config = SimpleNamespace(vocab_size=4)

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=math.log(3) * torch.nn.functional.one_hot((input_ids + 1) % 4, 4))


def test_the_loss_of_a_window_is_that_of_its_tokens_but_the_first_given_those_before():
    found = mean_losses(Counting(), [[0, 1, 2, 3], [0, 0, 1, 3]], QUIET)
    assert found == pytest.approx([math.log(2), (2 * math.log(6) + math.log(2)) / 3])
    assert found[1] != float(np.float32(found[1])), "its mean is one of float64"


def test_perplexity_under_noise_is_by_bytes_of_the_text(model, text, monkeypatch):
    words = "grüße € " * 40
    monkeypatch.setattr("paperlm.jobs.perturbed_perplexity.read_documents", lambda _: [words, words])
    monkeypatch.setattr("paperlm.evaluate.windows.mean_losses", lambda _, windows, *__: [2.0] * len(windows))
    job = PerturbedPerplexity(of=wide(), **TEXT, absolute=(None, -4), relative=(None,))
    found = made(job, model, (text,))
    size = 2 * 12 * 40 + 1  # of 8 characters 2 are of several bytes
    assert found.metrics["bytes"] == size and found.metrics["windows"] > 1
    loss = 2.0 * found.metrics["windows"] * 32 / size
    assert found.metrics["loss"] == pytest.approx(loss)
    assert found.series["grid"].rows == [
        [a, None, pytest.approx(loss), pytest.approx(math.exp(loss))] for a in (None, -4)
    ]


def test_a_record_with_the_bytes_of_packed_weights_says_by_which_rule_they_are_counted():
    counting = [StoredPerplexity(of=wide(), store=store, **TEXT) for store in ("packed", "plain")]
    jobs = [*counting, StoredSpeed(of=wide(), store="packed", batch=2, window=16)]
    assert ["neuzip_nbytes" in job.behaviours() for job in jobs] == [True, False, False]


def test_fewer_bits_of_the_mantissa_take_fewer_bytes(model, text):
    sizes = [
        perplexity(model, text, store="packed", mant_bits=bits, block_norm=512).metrics["weight_bytes"]
        for bits in (0, 1, 3)
    ]
    assert sizes == sorted(set(sizes))


LLAMA = {
    "architecture": "llama", "hidden_size": 192, "intermediate_size": 256, "n_heads": 4, "n_kv_heads": 2,
    "head_size": 48, "n_layers": 3, "vocab_size": 512, "std": 0.02,
}  # fmt: skip
T5 = LLAMA | {"architecture": "t5", "n_kv_heads": None}


def sizes(shape, **settings):
    return made(StoredBytes(**shape | settings), None)


@pytest.mark.parametrize(
    "settings",
    [
        {"store": "plain"},
        {"store": "packed"},
        {"store": "packed", "mant_bits": 3, "block_norm": 512},
        {"store": "packed", "policy": "all"},
        {"store": "int8"},
        {"store": "nf4_double"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.parametrize("shape", [LLAMA, LLAMA | {"tied": True}, T5], ids=["llama", "tied", "t5"])
def test_bytes_counted_by_shape_are_those_of_a_whole_model_with_other_random_weights(shape, settings):
    found = sizes(shape, **settings)
    job = StoredBytes(**shape, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = model_of(job, "meta").to_empty(device="cpu").bfloat16()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
    model.tie_weights()
    put_into_stores(model, job, "cpu")
    whole = weight_bytes(model)
    assert found.metrics["parameters"] == whole.stored_weights + whole.plain_weights
    assert found.metrics["stored_weights"] == whole.stored_weights
    # a draw differs by the codes' length, and each of some matrices by up to 63 bytes that fill its last 64
    room = 5 * found.standard_errors["weight_bytes"] + 64 * len(stored_weights(model))
    assert abs(found.metrics["weight_bytes"] - whole.total) <= (room if settings["store"] == "packed" else 0)


def test_an_error_of_bytes_grows_as_the_copies_of_a_matrix_do_and_that_of_bits_is_by_weight():
    one, four = (sizes(LLAMA, store="packed", n_layers=layers) for layers in (1, 4))
    errors = [found.standard_errors["weight_bytes"] for found in (one, four)]
    assert errors[1] == pytest.approx(4 * errors[0]) and errors[0] > 0
    bits = four.standard_errors["bits_per_weight"]
    assert bits == pytest.approx(8 * errors[1] / four.metrics["stored_weights"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_that_fits_on_a_card_in_its_stores_alone_gets_there():
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(16))).bfloat16()
    plain = sum(p.nbytes for p in model.parameters())
    job = StoredBytes(**LLAMA, store="packed", mant_bits=0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    put_into_stores(model, job, "cuda")
    assert torch.cuda.max_memory_allocated() - before < 0.6 * plain
    assert {weight.store.device.type for weight in stored_weights(model).values()} == {"cuda"}


PARAMETERS = {  # in billions, as the models' cards say
    "Llama-3 8B": 8.03, "Llama-2 13B": 13.02, "Yi-1.5 34B": 34.39, "Llama-3 70B": 70.55, "T5 1B": 0.738, "T5 3B": 2.852,
    "T5 11B": 11.307,
}  # fmt: skip


def test_the_tables_shapes_are_those_of_the_published_models():
    project, found = Project({"scale": "tiny"}), {}
    for name in ("neuzip_table3a_full", "neuzip_table3b_full", "neuzip_table4_full"):
        for cell in project.cells(name):
            model = cell.column.removesuffix(" Mem").removesuffix(" Bits")
            found.setdefault(model if model in PARAMETERS else "Llama-3 70B", set()).update(cell.jobs)
    assert found.keys() == PARAMETERS.keys()
    for model, jobs in found.items():
        counts = {sum(p.numel() for p in model_of(job, "meta").parameters()) for job in jobs}
        assert [round(count / 1e9, len(str(PARAMETERS[model]).partition(".")[2])) for count in counts] == [
            PARAMETERS[model]
        ]


def test_weights_that_stay_in_float32_take_four_bytes_and_are_no_stored_ones():
    theirs = 2 * 3 * 192 * 256  # of an encoder's and a decoder's three blocks
    for store, stays in (("plain", 0), ("packed", theirs)):
        apart, whole = (sizes(T5, store=store, in_float32=names).metrics for names in ([".wo."], []))
        assert whole["stored_weights"] - apart["stored_weights"] == stays
        if store == "plain":
            assert apart["weight_bytes"] - whole["weight_bytes"] == 2 * theirs
    for shape in (T5, LLAMA):
        with pytest.raises(JobError, match=r"no weight of the model has '\.wi_2\.'"):
            sizes(shape, store="packed", in_float32=["o", ".wi_2."])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_heads": 3}, "does not divide n_heads"),
        ({"n_heads": 5, "n_kv_heads": None}, "does not divide hidden_size"),
        ({"architecture": "t5"}, "n_kv_heads is of llama"),
        ({"architecture": "t5", "n_kv_heads": None, "tied": True}, "tied is of llama"),
        ({"store": "plain", "mant_bits": 3}, "mant_bits is of store packed"),
        ({"tied": True, "policy": "all_linear"}, "policy: the head is the embedding"),
    ],
)
def test_shapes_that_no_model_has_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        StoredBytes(**LLAMA | {"store": "packed"} | changes)


@pytest.mark.parametrize("store", ["int8", "nf4"])
def test_a_store_that_is_not_to_be_had_is_blocked_with_the_reason(model, text, store, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = perplexity(model, text, store=store)
    assert found.outcome == "blocked" and "bitsandbytes" in found.reason


def test_speed_is_blocked_without_a_gpu_and_times_passes_and_updates(model):
    speed = StoredSpeed(of=wide(), store="packed", batch=2, window=16)
    assert made(speed, model).outcome == "blocked"
    inputs, device = Inputs(models={"of": model}, work=model), torch.device("cpu")
    assert len(timed(iteration(speed, inputs, device), 2, lambda: None)) == 2
    descent = {"adam_betas": None, "adam_eps": None, "weight_decay": 0.0, "grad_clip": 0.0, "numerics": "pure_bf16"}
    of = wide(**descent, optimizer="lomo", weights="packed", loss_group=4)
    update = StoredSpeed(of=of, what="update", store="plain", batch=2, window=16)
    assert all(seconds > 0 for seconds in timed(iteration(update, inputs, device), 2, lambda: None))


def test_memory_of_speed_is_that_of_iterations_and_not_of_the_model_before_it_was_stored(model, monkeypatch):
    """A stand-in for a GPU on which building takes 900 bytes at its height and leaves 100, and an iteration 300."""
    peak = [0]
    monkeypatch.setattr(Machine, "torch_device", lambda machine: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.append(100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[-1])
    reached = lambda size: peak.append(max(peak[-1], size))  # noqa: E731
    monkeypatch.setattr(stored_speed, "iteration", lambda *given: reached(900) or (lambda: reached(300)))
    found = made(StoredSpeed(of=wide(), store="packed", batch=2, window=16, repeats=3), model)
    assert found.metrics["peak_bytes"] == 300


def test_a_speed_is_of_the_median_iteration_and_varies_as_one_iteration_does():
    """Rates of 2, 4 and 5 iterations a second: mean 11 / 3, deviation sqrt(7 / 3)."""
    rate, spread = rate_of([0.5, 0.25, 0.2])
    assert (rate, spread) == (4.0, pytest.approx((7 / 3) ** 0.5))
    assert rate_of([0.5]) == (2.0, 0.0)


def test_an_update_is_timed_in_the_numbers_of_its_pretraining_alone():
    with pytest.raises(ValidationError, match="timed in bfloat16; numerics of `of` is fp32, not pure_bf16"):
        StoredSpeed(of=wide(numerics="fp32"), what="update", store="plain", batch=2, window=16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store": "nf4", "mant_bits": 3}, "mant_bits is of store packed"),
        ({"store": "packed", "block_norm": 512}, "fewer than 7 bits"),
        ({"store": "packed", "mant_bits": 0, "block_norm": 48}, "power of two"),
        ({"store": "packed", "mant_bits": 0, "norm_semantics": "authors_v1"}, "give that too"),
        ({"store": "plain", "policy": "all"}, "leave it out"),
        ({"store": "plain", "at": 99}, "has states 0 to 3 beside its end"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        StoredPerplexity(of=wide(), **TEXT, **changes)
    assert "stored_perplexity" in job_kinds()


def test_a_text_is_cut_into_windows_of_its_own_tokens_alone(monkeypatch):
    def tokenizer(text, add_special_tokens=True, verbose=True):
        return {"input_ids": [-1] * add_special_tokens + list(range(len(text)))}

    monkeypatch.setattr("paperlm.models.folder.load_tokenizer", lambda folder: tokenizer)
    for length in (8, 11):
        assert windows_of("a job", None, "x" * length, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows_of("a job", None, "x" * 4, 4) == [[0, 1, 2, 3]]
    with pytest.raises(JobError, match="a job: the text has 3 tokens, less than a window of 4"):
        windows_of("a job", None, "xxx", 4)


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("title", ["", "a job"])
def test_windows_are_counted_on_a_bar_where_it_is_wanted_and_has_a_name(progress, title, capsys):
    machine = Machine(device="cpu", progress=progress)
    mean_losses(Counting(), [[0, 1, 2, 3]], machine, title)
    assert ("a job" in capsys.readouterr().err) == (progress and title == "a job")


def test_what_came_of_a_weight_that_a_card_found_damaged_is_not_recorded():
    """The word that kernels leave behind is read before an evaluation is counted."""

    model = torch.nn.Linear(4, 4).bfloat16()
    assert counted(model, torch.device("cpu"))["weight_bytes"] == 2 * (16 + 4)
    decode_errors.word(torch.device("cpu")).fill_(1)
    with pytest.raises(ContainerError, match="damaged; load it again"):
        counted(model, torch.device("cpu"))
    assert counted(model, torch.device("cpu")), "said once"


def test_a_speed_has_an_error_and_damage_that_kernels_found_on_the_way_is_looked_at(monkeypatch):
    told, clock = [], iter(range(1000))
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77)
    monkeypatch.setattr("paperlm_kernels.neuzip.raise_decode_errors", lambda device: told.append(device))
    monkeypatch.setattr(stored_speed.time, "perf_counter", lambda: next(clock) ** 2 / 100)
    found = stored_speed.speed_of(lambda: None, 5, torch.device("cuda"))
    seconds = [(2 * begin + 1) / 100 for begin in range(3, 13, 2)]
    rates = [1 / one for one in seconds]
    assert found.metrics == {"iterations_per_second": pytest.approx(1 / seconds[2]), "peak_bytes": 77}
    assert found.standard_errors == {"iterations_per_second": pytest.approx(statistics.stdev(rates))}
    assert told == [torch.device("cuda")]
