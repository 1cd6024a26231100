"""Model folders: what they hold, who can read them, and what a damaged one says."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import job_environment
from support_model import close, tiny_folder
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from paperlm.errors import JobError
from paperlm.models.folder import architecture_class, load_model, load_tokenizer, model_with_cache
from paperlm.models.llama import PaperLlamaForCausalLM, PaperLlamaModel

PARTS = ["config.json", "generation_config.json", "model.safetensors", "paperlm_model.py"]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def change(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def in_a_new_process(code, tmp_path, **environment):
    """Runs code that has not imported paperlm."""
    environment = job_environment(HF_HOME=str(tmp_path), **environment)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


# --- reading ---


def test_a_folder_holds_model_module_and_tokenizer(folder):
    assert sorted(p.name for p in folder.iterdir()) == sorted(PARTS + TOKENIZER)


def test_a_folder_gives_back_the_model_in_evaluation_mode(folder):
    model, ids = load_model(folder), torch.arange(9)[None]
    assert type(model) is PaperLlamaForCausalLM and not model.training
    close(model(ids).logits, AutoModelForCausalLM.from_pretrained(folder)(ids).logits)
    trunk = load_model(folder, head="none", attn_implementation="eager")
    assert type(trunk) is PaperLlamaModel and trunk.config._attn_implementation == "eager"
    close(trunk(ids).last_hidden_state, model.model(ids).last_hidden_state, 1e-5)


def test_the_tokenizer_knows_the_trained_length_and_adds_nothing(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.model_max_length == 64 and tokenizer.padding_side == "right"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<pad>")
    text = "The cat sat on the mat."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    batch = tokenizer(["The cat", text], padding=True)
    assert batch["attention_mask"][0][-1] == 0 and batch["input_ids"][0][-1] == tokenizer.pad_token_id


def test_a_score_saved_by_a_trainer_is_read_with_its_head_and_not_without(folder, tmp_path):
    with pytest.raises(JobError, match=r"weights do not fit the model: score\.weight, lm_head\.weight"):
        load_model(folder, head="sequence")
    scored = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    scored.save_pretrained(tmp_path)
    assert load_model(tmp_path, head="sequence").score.weight.shape == (2, 24)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(set(PARTS) - {"generation_config.json"})
    with pytest.raises(JobError, match=r"lm_head\.weight, score\.weight"):
        load_model(tmp_path)
    close(load_model(tmp_path, head="none").norm.weight, scored.model.norm.weight)


def test_a_tokenizer_is_read_first_of_all_without_a_question_about_code_in_the_folder(folder):
    """A fresh process, whose answer would be yes."""
    code = "import pathlib, sys; from paperlm.models.folder import load_tokenizer\n"
    code += "print(len(load_tokenizer(pathlib.Path(sys.argv[1]))))"
    done = subprocess.run(
        [sys.executable, "-c", code, folder],
        env=job_environment(),
        input="y\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.strip().isdecimal(), done.stderr
    assert "custom code" not in done.stdout + done.stderr


def test_a_folder_of_an_earlier_version_still_loads(copy, folder):
    (copy / "paperlm_model.py").unlink()
    change(copy, auto_map={}, id2label=None, label2id=None, dtype="float32", num_labels=1, use_cache=True)
    close(load_model(copy).lm_head.weight, load_model(folder).lm_head.weight)


# --- tools that do not know paperlm ---

READ_ALL = """
import sys
from transformers import AutoTokenizer, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
assert "paperlm" not in sys.modules
folder, out = {folder!r}, {out!r}
options = {{"trust_remote_code": True}}
print(AutoTokenizer.from_pretrained(folder, **options).model_max_length)
for auto in (AutoModel, AutoModelForSequenceClassification, AutoModelForCausalLM):
    model = auto.from_pretrained(folder, **options)
    print(type(model).__module__, type(model).__name__)
model.save_pretrained(out)
"""


def test_a_process_that_trusts_the_folder_needs_no_import_of_paperlm(folder, tmp_path):
    done = in_a_new_process(READ_ALL.format(folder=str(folder), out=str(tmp_path / "out")), tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        "64",
        "paperlm.models.decoder PaperLlamaModel",
        "paperlm.models.llama PaperLlamaForSequenceClassification",
        "paperlm.models.llama PaperLlamaForCausalLM",
    ]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == PARTS, "and no source of paperlm"
    close(load_model(tmp_path / "out").lm_head.weight, load_model(folder).lm_head.weight)


def test_without_paperlm_the_folder_says_what_to_install(folder, tmp_path):
    code = (
        "import sys; sys.modules['paperlm'] = None; from transformers import AutoModel; "
        f"AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)"
    )
    done = in_a_new_process(code, tmp_path)
    assert "install it with pip from a checkout of the repository that made the folder" in done.stderr


@pytest.mark.slow
def test_lm_eval_reads_the_folder_from_its_command_line(folder, tmp_path):
    pytest.importorskip("lm_eval")
    items = [
        {"question": "The sky is", "choices": [" blue", " a long way from here"], "answer": 0},
        {"question": "Two and two are", "choices": [" four", " five or six"], "answer": 0},
        {"question": "The grass is", "choices": [" red", " green"], "answer": 1},
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": "three_items",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "three_items.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "three_items", "--device", "cpu"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--include_path", tmp_path / "tasks"]
    command += ["--output_path", tmp_path / "out", "--batch_size", "4", "--log_samples"]
    environment = job_environment(HF_HOME=str(tmp_path / "home"), HF_DATASETS_OFFLINE="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "out").rglob("results*.json")
    accuracy = json.loads(result.read_text())["results"]["three_items"]["acc,none"]
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    assert accuracy == pytest.approx(sum(_chosen(model, tokenizer, item) == item["answer"] for item in items) / 3)


def _chosen(model, tokenizer, item):
    """The continuation with the largest sum of log-probabilities, one at a time."""
    start = tokenizer(item["question"]).input_ids
    sums = []
    for choice in item["choices"]:
        ids = tokenizer(item["question"] + choice).input_ids
        assert ids[: len(start)] == start
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        sums.append(sum(log_probs[t - 1, ids[t]].item() for t in range(len(start), len(ids))))
    return sums.index(max(sums))


# --- damage ---


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_one_too_many(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(21, 24)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def only_pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "no model that transformers can read"),
        (without_a_weight, r"do not fit the model: model\.layers\.1\.mlp\.up_proj\.weight"),
        (with_one_too_many, r"do not fit the model: model\.layers\.2\.mlp\.up_proj\.weight"),
        (only_pickled, "no model that transformers can read"),
        (lambda f: (f / "model.safetensors").unlink(), "no model that transformers can read"),
        (lambda f: (f / "config.json").write_text("{"), "no model that transformers can read"),
        (lambda f: change(f, hidden_act="gelu"), "hidden_act"),
        (lambda f: change(f, hidden_size=48), r"do not fit the model: lm_head\.weight is .* and not .*48\)"),
        (lambda f: change(f, num_layers=3), "did you mean 'num_labels'"),
        (lambda f: (f / "config.json").unlink(), "no model folder; make the model first"),
    ],
)
def test_a_damaged_folder_is_named_with_what_is_wrong(copy, damage, message):
    damage(copy)
    with pytest.raises(JobError, match=message) as error:
        load_model(copy)
    assert str(copy) in str(error.value)


def test_a_folder_without_a_tokenizer_is_named(copy):
    for name in TOKENIZER:
        (copy / name).unlink()
    with pytest.raises(JobError, match="no tokenizer that transformers can read"):
        load_tokenizer(copy)
    for load in (load_tokenizer, load_model):
        with pytest.raises(JobError, match="org/name: no model folder"):  # nothing asks the hub for it
            load("org/name")


def test_an_unknown_head_is_refused_with_the_nearest_name(folder):
    with pytest.raises(JobError, match="did you mean 'sequence'"):
        load_model(folder, head="sequences")


def test_a_trunk_is_read_through_every_auto_class(folder):
    assert type(AutoModel.from_pretrained(folder)) is PaperLlamaModel


def test_the_architecture_is_the_first_one_that_a_configuration_names(folder):
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM", "GPT2LMHeadModel"])
    assert architecture_class(config) is transformers.LlamaForCausalLM
    own = AutoConfig.from_pretrained(folder, local_files_only=True)
    assert architecture_class(own) is PaperLlamaForCausalLM
    for names in (["LlamaFor"], ["LlamaConfig"], None):
        with pytest.raises(JobError, match=r"names the architecture '(LlamaFor|LlamaConfig|none)'"):
            architecture_class(transformers.LlamaConfig(architectures=names))


def test_quantized_keys_and_values_are_of_this_projects_decoder(folder, tmp_path):
    bits = {"kv_bits": 4}
    assert model_with_cache(folder, None).config.kv_cache is None
    assert model_with_cache(folder, bits).config.kv_cache["kv_bits"] == 4
    transformers.LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(JobError, match="this is another architecture"):
        model_with_cache(tmp_path, bits)


def test_what_is_read_of_a_folder_asks_no_network_and_trusts_no_code(folder, monkeypatch):
    asked = []
    for auto in (AutoTokenizer, AutoConfig, AutoModelForCausalLM):
        real = auto.from_pretrained

        def noted(*given, real=real, **keywords):
            asked.append((keywords.get("local_files_only"), keywords.get("trust_remote_code")))
            return real(*given, **keywords)

        monkeypatch.setattr(auto, "from_pretrained", noted)
    load_tokenizer(folder)
    model_with_cache(folder, {"kv_bits": 4})
    assert len(asked) >= 3 and set(asked) == {(True, False)}
