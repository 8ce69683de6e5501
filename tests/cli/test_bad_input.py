"""User mistakes through the command line: one line that names the mistake, its exit code, and nothing lost."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bottega import cli
from bottega.core.rundir import Lock, RunDirectory
from small_run import differing_tensors, read_logged_steps, read_tensors, run_bottega, train_arguments, write_text


class CommandResult:
    """Exit code and output of a command that is run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        capsys.readouterr()
        self.code = cli.main(arguments)
        self.out, self.err = capsys.readouterr()

    def assert_refused(self, code: int, *parts: str) -> str:
        assert self.code == code, self.err
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, f"one line, not {self.err!r}"
        assert lines[0].startswith("bottega: ")
        assert "Traceback" not in self.err
        for part in parts:
            assert part in lines[0], f"{part!r} is not in {lines[0]!r}"
        return lines[0]


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: CommandResult(capsys, [str(a) for a in arguments])


@pytest.fixture
def train(run_cli: Any, tmp_path: Path, text_file: Path) -> Any:
    """`bottega train` on the small text; keyword arguments are recipe keys."""

    def run_train(
        *flags: str, text: Path = text_file, output: Path = tmp_path / "runs", **changes: Any
    ) -> CommandResult:
        return run_cli(*train_arguments(output, text, "--quiet", *flags, **changes))

    return run_train


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


# The recipe


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("training: {learnig_rate: 1e-4}\n", ["training.learnig_rate", "learning_rate"]),
        ("seed: 1\nseed: 2\n", ["my.yaml:2", "seed", "given twice"]),
        ("training: {batch_size: many}\n", ["training.batch_size", "many"]),
        ("name: !!python/object/apply:os.system ['touch boom']\n", ["my.yaml:1", "tags such as"]),
        ("seed: 1\n\tname: x\n", ["my.yaml:2", "not YAML"]),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n" + "".join(
            f"{chr(c)}: &{chr(c)} [{','.join([f'*{chr(c - 1)}'] * 9)}]\n" for c in range(ord("c"), ord("m"))
        ), ["my.yaml", "aliases"]),
        ("a: " + "[" * 3000 + "]" * 3000 + "\n", ["my.yaml:1", "nested deeper"]),
        ("model: {_target_: os.system}\n", ["_target_"]),
        ("data: {train: {path: '${HOME}/corpus.txt'}}\n", ["data.train.path", "${...}"]),
        ("- a list\n", ["my.yaml", "a block of keys"]),
        ("device: tpu\n", ["device", "tpu"]),
        ("training: {on_nonfinite: ignore}\n", ["training.on_nonfinite", "ignore"]),
    ],
    ids=["unknown key", "duplicate", "type", "tag", "tab", "alias bomb", "deep", "target", "env", "list", "device", "choice"],
)  # fmt: skip
def test_invalid_recipe_is_refused(run_cli: Any, tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write_recipe(tmp_path, text)
    run_cli("train", "language", path, f"output_dir={tmp_path}/runs", "training.max_steps=1").assert_refused(2, *parts)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["my.yaml"], "nothing was created or executed"


def test_all_mistakes_are_reported_at_once(run_cli: Any, tmp_path: Path) -> None:
    result = run_cli("train", "language", write_recipe(tmp_path, "seeed: 1\ntraining: {batch_size: 0}\n"))
    assert result.code == 2
    assert len(result.err.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian", "language"], ["'trian' is not a verb", "did you mean train?"]),
        (["train"], ["no recipe given"]),
        (["train", "langauge"], ["langauge", "did you mean language"]),
        (["train", "nowhere.yaml"], ["nowhere.yaml", "does not exist"]),
        (["train", "language", "training.max_stepz=3"], ["training.max_stepz", "max_steps"]),
        (["train", "language", "--no-such-flag", "3"], ["no-such-flag"]),
        (["train", "language", "training.learning_rate=fast"], ["training.learning_rate", "fast"]),
        (["train", "language", "--lr", "1e-3", "--learning_rate", "2e-3"], ["learning_rate"]),
        (["generate"], ["give one run: bottega generate runs/NAME"]),
        (["ledger", "runs/a"], ["bottega: ledger: the following arguments are required: --step"]),
        (["generate", "a", "b"], ["unexpected b"]),
        (["evaluate", "a", "--nonsense"], ["--nonsense"]),
        (["generate", "a", "--count", "x"], ["--count", "x"]),
        (["plan", "language", "--check", "--memory"], ["--check and --memory"]),
    ],
)
def test_invalid_command_line_is_refused(run_cli: Any, arguments: list[str], parts: list[str]) -> None:
    run_cli(*arguments).assert_refused(2, *parts)


def test_missing_base_model_is_refused(run_cli: Any, tmp_path: Path) -> None:
    text = "task: personalize\ntraining: {max_steps: 1}\nmodel: {diffusion: sd}\ndata: {train: {path: .}}\n"
    result = run_cli("train", write_recipe(tmp_path, text), f"output_dir={tmp_path}/runs")
    result.assert_refused(2, "model.language_model", "give a folder or a hub name")
    assert not (tmp_path / "runs").exists()


def test_scientific_notation_is_a_number(train: Any) -> None:
    assert train(name="sci", **{"training.learning_rate": "1e-4", "training.max_steps": 1}).code == 0


# The data


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["corpus.txt"]),
        (b"", ["corpus.txt", "empty"]),
        (b"\x00\x01\x02\xff" * 200, ["corpus.txt"]),
        (b"caf\xe9 " * 200, ["corpus.txt", "UTF-8"]),
        (b"too short", ["fewer than one window"]),
        (b"long enough for a window but not for a whole batch\n", ["fewer than one batch of 4"]),
    ],
    ids=["missing", "empty", "binary", "latin-1", "no window", "no batch"],
)
def test_unusable_text_is_refused(train: Any, tmp_path: Path, content: bytes | None, parts: list[str]) -> None:
    corpus = tmp_path / "corpus.txt"
    if content is not None:
        corpus.write_bytes(content)
    line = train(text=corpus, name="bad").assert_refused(3, *parts)
    assert not re.search(r"0x[0-9a-f]{8}", line)
    assert not list((tmp_path / "runs").rglob("step-*"))


def test_sample_prompts_are_checked_before_the_first_step(train: Any, tmp_path: Path) -> None:
    train(name="p", **{"samples.prompts": "['Ω']", "samples.every": 100}).assert_refused(2, "samples.prompts", "Ω")
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_text_without_line_breaks_is_sampled(train: Any, tmp_path: Path) -> None:
    corpus = write_text(tmp_path / "line.txt")
    corpus.write_text(corpus.read_text().replace("\n", " "))
    result = train(text=corpus, name="line", **{"samples.every": 8, "samples.count": 2, "samples.max_new_tokens": 5})
    assert result.code == 0, result.err
    assert len(list((tmp_path / "runs" / "line" / "samples").rglob("*.txt"))) == 2


def test_changed_data_needs_consent_to_resume(train: Any, tmp_path: Path) -> None:
    corpus = write_text(tmp_path / "corpus.txt")
    assert train(text=corpus, name="run", **{"training.max_steps": 4}).code == 0
    run = tmp_path / "runs" / "run"
    before = read_tensors(run)
    corpus.write_text(corpus.read_text().replace("alpha", "gamma", 20))
    longer = {"name": "run", "training.max_steps": 6}
    train(text=corpus, **longer).assert_refused(3, "the data has changed", "--allow-data-change", "--fresh")
    assert differing_tensors(before, read_tensors(run)) == []
    assert train("--allow-data-change", text=corpus, **longer).code == 0
    assert read_logged_steps(run) == [1, 2, 3, 4, 5, 6]
    assert train(text=corpus, **longer).code == 0, "the change is recorded, so consent is needed once"


# The machine


@pytest.mark.parametrize("where", ["under a file", "/proc/bottega"])
def test_unwritable_output_dir_is_refused(train: Any, tmp_path: Path, where: str) -> None:
    (tmp_path / "under a file").write_text("")
    train(output=tmp_path / where, name="x").assert_refused(5, "cannot write", where)


def test_missing_gpu_is_refused(train: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is available")
    train(name="x", device="cuda").assert_refused(5, "cuda is not available", "device=cpu")


def test_batch_size_must_be_divisible_by_the_processes(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before this process waits for other ranks, which do not exist."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    train(name="x").assert_refused(2, "training.batch_size: 4", "3 processes", "1, 2, 4")


def test_second_process_in_a_run_directory_is_refused(train: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    with Lock(RunDirectory(tmp_path / "runs" / "x")):
        train(name="x").assert_refused(9, "is in use by process", "name=")
        train("--fresh", name="x").assert_refused(9)
    assert train(name="x").code == 0


def test_model_larger_than_memory_is_refused(train: Any) -> None:
    train(name="x", **{"model.hidden_size": 2_000_000, "model.head_size": 1_000_000}).assert_refused(7, "out of memory")


# Runs and checkpoints


def test_missing_run_suggests_nearest_name(run_cli: Any, finished_run: Path) -> None:
    for verb in ("evaluate", "generate", "export"):
        run_cli(verb, finished_run.parent / "finishd").assert_refused(2, "no run at", "did you mean", str(finished_run))
    run_cli("evaluate", "--model_path", finished_run / "processor").assert_refused(2, "no run at")
    run_cli("evaluate", finished_run, "--checkpoint", "5").assert_refused(2, "no checkpoint at step 5", "4, 8")
    run_cli("evaluate", finished_run, "--checkpoint", "newest").assert_refused(2, "newest", "best, last or a step")


def test_prompt_outside_the_vocabulary_is_refused(run_cli: Any, finished_run: Path) -> None:
    result = run_cli("generate", finished_run, "--prompt", "Ω", "--max_tokens", 3)
    result.assert_refused(2, "Ω")


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """A pickle that creates a file when it is loaded."""

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "boom",))

    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(Bomb()))
    return path


def test_pickle_is_refused_everywhere(run_cli: Any, train: Any, bomb: Path, tmp_path: Path, finished_run: Path) -> None:
    train(f"--resume_from={bomb}", name="x").assert_refused(4, str(bomb), "pickled checkpoints are never read")
    for verb in ("evaluate", "generate", "export"):
        run_cli(verb, "--model_path", bomb).assert_refused(4, str(bomb), "never read")
    run = copy_run(finished_run, tmp_path)
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.copy(bomb, folder / "model.safetensors")
    run_cli("evaluate", run).assert_refused(4, "model.safetensors")
    train(f"--resume_from={run}", name="y").assert_refused(4, "model.safetensors")
    shutil.copy(bomb, run / "processor" / "tokenizer.json")
    assert run_cli("generate", finished_run).code == 0
    assert not (tmp_path / "boom").exists()


def copy_run(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "runs" / "finished", symlinks=True))


def test_damaged_checkpoint_named_explicitly_is_refused(train: Any, tmp_path: Path, finished_run: Path) -> None:
    run = copy_run(finished_run, tmp_path)
    path = run / "checkpoints" / "step-00000008"
    with (path / "optimizer.safetensors").open("r+b") as file:
        file.truncate(100)
    train(f"--resume_from={path}", name="x").assert_refused(
        4, "step-00000008 is damaged", "optimizer.safetensors has 100 of"
    )
    train(f"--resume_from={run}", name="x").assert_refused(4, "step-00000008 is damaged")
    train(f"--resume_from={tmp_path}/nothing", name="x").assert_refused(2, "no checkpoint at")


def test_damaged_newest_checkpoint_falls_back_with_a_warning(
    run_cli: Any, tmp_path: Path, text_file: Path, finished_run: Path
) -> None:
    run = copy_run(finished_run, tmp_path)
    before = read_tensors(run)
    newest = run / "checkpoints" / "step-00000008" / "model.safetensors"
    raw = newest.read_bytes()
    newest.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    result = run_cli(*train_arguments(tmp_path / "runs", text_file, name="finished"))
    assert result.code == 0, result.err
    assert "step-00000008 is damaged: model.safetensors does not match its SHA-256; trying an older one" in result.err
    assert "step-00000004 at step 4 of 8" in result.err
    assert differing_tensors(before, read_tensors(run)) == [], "the damaged checkpoint is written again, bitwise equal"
    assert read_logged_steps(run) == list(range(1, 9))


def test_run_without_a_valid_checkpoint_does_not_start_over_silently(
    train: Any, tmp_path: Path, finished_run: Path
) -> None:
    run = copy_run(finished_run, tmp_path)
    for manifest in run.glob("checkpoints/step-*/MANIFEST.json"):
        manifest.write_bytes(b"{}")
    train(name="finished").assert_refused(4, "is damaged", "--fresh")
    result = train("--fresh", name="finished")
    assert result.code == 0
    assert (tmp_path / "runs" / "finished.1" / "metrics.jsonl").is_file(), "--fresh keeps the old run"


@pytest.mark.parametrize("change", [{"seed": 1}, {"model.num_layers": 2}], ids=str)
def test_other_recipe_under_the_same_name_is_refused(
    train: Any, tmp_path: Path, finished_run: Path, change: dict[str, Any]
) -> None:
    run = copy_run(finished_run, tmp_path)
    before = read_tensors(run)
    train(name="finished", **change).assert_refused(2, *change, "choose another name, or start over with --fresh")
    assert differing_tensors(before, read_tensors(run)) == []


def test_resumable_changes_are_accepted(train: Any, tmp_path: Path, finished_run: Path) -> None:
    run = copy_run(finished_run, tmp_path)
    assert train(name="finished", **{"training.max_steps": 10, "checkpoint.keep": 1, "data.workers": 1}).code == 0
    assert read_logged_steps(run) == list(range(1, 11))


def test_resume_with_other_batch_size_continues_by_samples(train: Any, tmp_path: Path, finished_run: Path) -> None:
    run = copy_run(finished_run, tmp_path)
    result = train(name="finished", **{"training.batch_size": 8, "training.max_steps": 12})
    assert result.code == 0, result.err
    assert read_logged_steps(run) == [*range(1, 9), *range(5, 13)], "8 steps of 4 are 4 of 8"
    assert "continuing by samples" in (run / "log.txt").read_text()


# The real command


def test_subprocess_prints_the_same_error(tmp_path: Path, text_file: Path) -> None:
    process = run_bottega(train_arguments(tmp_path, text_file, "training.max_stepz=3"))
    assert process.returncode == 2
    assert process.stderr.startswith("bottega: ")
    assert len(process.stderr.strip().splitlines()) == 1
    assert process.stdout == ""
    debug = run_bottega(["train", "nowhere.yaml", "--debug"])
    assert "Traceback" in debug.stderr, "--debug shows the traceback"


def test_environment_secrets_are_not_written(tmp_path: Path, text_file: Path) -> None:
    canary = "canary-4f1b2c9d"
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
    process = run_bottega(
        train_arguments(tmp_path, text_file, name="quiet", **{"logging.tensorboard": True, "samples.every": 4}),
        env=dict.fromkeys(names, canary),
    )
    assert process.returncode == 0, process.stderr
    assert canary not in process.stdout + process.stderr
    files = [path for path in (tmp_path / "quiet").rglob("*") if path.is_file()]
    assert len(files) > 15
    assert list((tmp_path / "quiet").glob("events.out.tfevents.*"))
    assert [path for path in files if canary.encode() in path.read_bytes()] == []
