"""``zprof plan``: the best policies of a job on the command line, the policy it writes, and how it ends badly."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.policy import Policy
from tests.support.terminal import on_a_terminal
from tests.support.torches import on_a_device_in_python
from tests.support.virtual import on_virtual
from zprof.cli import main
from zprof.commands.model_jobs import job_of_size

JOB = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(2)])
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer):
    model(torch.empty(512, 256, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def reads(model, optimizer):
    return model(torch.empty(512, 256, device="virtual")).mean().item()

def job():
    return build, step

def needs_data():
    return build, reads

def speaks():
    print("loaded")
    return lambda: print("building") or build(), step
"""
KEEPS = '[units]\nmin_numel = 0\n[precision]\nparam = "bf16"\n'


@contextmanager
def folder() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as made:
        Path(made, "planned_job.py").write_text(JOB)
        Path(made, "keeps.toml").write_text(KEEPS)
        os.chdir(made)
        try:
            yield Path(made)
        finally:
            os.chdir(before)


def zprof(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], catch_exceptions=False)


@on_virtual()
def test_the_best_are_printed_and_the_first_is_written_as_a_policy() -> None:
    with folder() as here:
        given = ("--policy", "keeps.toml", "--precision", "fp32", "--world", "8", "-o", "found.toml", "--json")
        told = zprof("planned_job.py:job", *given)
        assert told.exit_code == 0, told.output
        found = json.loads(told.stdout)
        written = Policy.load(here / "found.toml")
        assert Policy.of(found["best"][0]["policy"]) == written
        assert written.precision.param == "fp32"
        assert found["simulations"] <= 16 and told.stderr.count("simulated ") >= found["simulations"]
        again = zprof("planned_job.py:job", "--world", "8", "-o", "found.toml")
        assert again.exit_code == 1 and "exists already" in again.stderr


@on_a_device_in_python
@on_virtual()
def test_where_nothing_fits_it_ends_with_three_and_one_line() -> None:
    with folder():
        result = zprof("planned_job.py:job", "--world", "2", "--device", "10KiB", "--host", "0", "--disk", "0")
    assert result.exit_code == 3 and result.stdout == ""
    verdict = result.stderr[result.stderr.index("find_policy: ") :].splitlines()
    advice = verdict.index("Use more ranks, hardware with more memory, or a smaller batch or model.")
    assert all(len(line) <= 100 for line in verdict) and re.match(
        r"find_policy: does not fit on 2 ranks of h100, by simulation: needs [\d.]+ \w+ on the device per rank, "
        r"the device has 10 KiB \(stage 3, ",
        re.sub(r"\s+", " ", " ".join(verdict[:advice])),
    )
    assert verdict[advice + 1 :] == [
        "Of host and disk 0 bytes may be used: allow more.",
        "To try smaller micro-batches, give step the parameters micro_batch and accumulation with defaults.",
    ]


@on_a_device_in_python
@on_virtual()
def test_what_it_is_doing_is_on_stderr_from_the_start_and_stdout_is_json_alone() -> None:
    with folder():
        result = zprof("planned_job.py:speaks", "--world", "2", "--most", "1", "--json")
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert said[:2] == ["loaded", "zprof: searching policies for planned_job.py:speaks on h100 x 2: at most 1 simulation ..."]
    assert json.loads(result.stdout)["best"] and any(line.startswith("simulated 1: stage ") for line in said)
    assert "building" in said and "building" not in result.stdout


@pytest.mark.slow
@on_a_device_in_python
def test_on_a_terminal_one_line_is_rewritten_and_gone_at_the_end() -> None:
    with folder() as here:
        words = ["-m", "zprof", "plan", "planned_job.py:job", "--hardware", "rtx4090", "--most", "1"]
        code, shown = on_a_terminal(words, here)
    assert code == 0, shown
    drawn = shown[: shown.rindex("simulated 1: ")]
    assert "searching policies for planned_job.py:job" in drawn and "\n" not in drawn
    after = shown.rpartition("\x1b[2K")[2]
    assert "rtx4090 x 1, " in after and "searching" not in after and "simulated 1" not in after
    assert "one node of rtx4090 has 1 device; --nodes or --world takes another number" in after
    assert "--precision bf16,fp32 tries bf16 as well" in after


@on_a_device_in_python
@on_virtual()
def test_a_step_that_needs_data_is_one_line_that_names_its_own() -> None:
    with folder():
        result = zprof("planned_job.py:needs_data", "--world", "2")
    assert result.exit_code == 1 and "planned_job.py:15" in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.py:job"], 2, "missing.py"),
        (["planned_job.py:jab"], 2, "did you mean job?"),
        (["planned_job.py:job", "--device", "much"], 2, "expected bytes or a size"),
        (["planned_job.py:job", "--precision", "bf17"], 2, "expected some of bf16, fp16 and fp32"),
        (["planned_job.py:job", "--nodes", "2", "--world", "4"], 2, "expected one of them"),
        (["planned_job.py:job", "--nodes", "0"], 2, "--nodes"),
        (["planned_job.py:job", "--hardware", "h10"], 1, "did you mean h100"),
        (["planned_job.py:job", "--policy", "keeps.toml", "-o", "keeps.toml", "-f"], 1, "is the input"),
        (["planned_job.py:job", "--policy", "none.toml"], 1, "none.toml"),
        (["planned_job.py:job", "-o", "gone/found.toml"], 1, "gone/found.toml: cannot be written"),
        (["planned_job.py:job", "--device", "81GiB"], 1, "expected device from 0 to the 80 GiB that h100 has"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_simulated(arguments: list[str], code: int, said: str) -> None:
    with folder():
        result = zprof(*arguments)
    assert result.exit_code == code and said in result.output and "simulated" not in result.output


@on_a_device_in_python
@on_virtual()
def test_no_more_is_simulated_than_was_asked_for_and_what_does_not_fit_is_marked() -> None:
    with folder():
        for most in (1, 4):
            result = zprof("planned_job.py:job", "--world", "2", "--most", str(most), "--json")
            assert result.exit_code == 0 and 1 <= result.stderr.count("simulated ") <= most, result.output
            assert "does not fit" not in result.stderr
        lines = zprof("planned_job.py:job", "--world", "2", "--device", "3MiB", "--most", "1").stderr.splitlines()
    unfit = [line for line in lines if line.startswith("simulated ")]
    assert unfit and all(re.search(r"on the device, does not fit: device [\d.]+ MiB of 3 MiB$", line) for line in unfit), lines


@on_a_device_in_python
@on_virtual()
def test_a_budget_is_written_and_a_device_keeps_room_for_its_context() -> None:
    with folder() as here:
        result = zprof("planned_job.py:job", "--world", "2", "--most", "2", "-o", "found.toml", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["limits"]["device"] == (80 << 30) - (3 << 29)
        best = json.loads(result.stdout)["best"][0]
        loaded = Policy.load(here / "found.toml")
        assert loaded.budget.device == (80 << 30) - (3 << 29) or best["policy"]["stage"] == 3


@on_a_device_in_python
@on_virtual()
def test_a_node_may_have_more_host_memory_than_its_profile() -> None:
    with folder():
        result = zprof("planned_job.py:job", "--hardware", "rtx4090", "--host", "512GiB", "--most", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["limits"]["host"] == 512 << 30


@on_a_device_in_python
@on_virtual()
def test_a_size_and_a_config_folder_are_planned_without_a_job() -> None:
    given = ("--sequence", "32", "--world", "1", "--most", "1", "--json")
    with folder() as here:
        sized = zprof("--params", "12M", *given)
        assert sized.exit_code == 0, sized.output
        assert "a Llama of 0.01B parameters" in sized.stderr
        config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128}
        (here / "model").mkdir()
        (here / "model" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
        assert zprof("--config", "model", *given).exit_code == 0
        uncached = {**config, "num_attention_heads": 2, "use_cache": False}
        (here / "model" / "config.json").write_text(json.dumps(uncached))
        reads = zprof("--config", "model", *given)
        assert reads.exit_code == 1 and "leave use_cache of the model's config at True" in reads.stderr, reads.output
        (here / "model" / "config.json").write_text(json.dumps({"model_type": "vit"}))
        other = zprof("--config", "model", *given)
        assert other.exit_code == 2 and "expected a causal language model of transformers, found ViTConfig" in other.stderr
        none = zprof("--config", "nowhere", *given)
        assert none.exit_code == 2 and "expected a folder with a config.json, found none" in none.stderr
    for words in ((), ("planned_job.py:job", "--params", "7B")):
        assert "expected one of JOB, --params and --config" in zprof(*words).stderr


@pytest.mark.parametrize("asked", [350 * 10**6, 10**9, 7 * 10**9, 13 * 10**9, 70 * 10**9])
def test_a_llama_of_a_size_has_about_so_many_parameters(asked: int) -> None:
    name = job_of_size(asked, 1, 64).name
    found = float(re.findall(r"of ([\d.]+)B", name)[0]) * 1e9
    assert abs(found - asked) <= 0.03 * asked, name


@on_a_device_in_python
@on_virtual()
def test_a_search_that_is_stopped_prints_and_writes_what_it_has_found() -> None:
    with folder() as here:
        stopping = JOB + """
import os, signal
count = 0

def stops():
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return build()

def job():
    return stops, step
"""
        Path("stopping.py").write_text(stopping)
        result = zprof("stopping.py:job", "--world", "2", "-o", "found.toml", "--json")
        assert result.exit_code == 1, result.output
        assert "stopped by SIGTERM: these are the best of 1 simulation" in result.stderr
        found = json.loads(result.stdout)
        assert found["stopped"] and len(found["best"]) == 1
        assert Policy.of(found["best"][0]["policy"]) == Policy.load(here / "found.toml")
        # Built once for its layouts, and once for each simulation.
        at_once = stopping.replace("count == 3", "count == 2")
        Path("at_once.py").write_text(at_once)
        none = zprof("at_once.py:job", "--world", "2")
        assert (none.exit_code, none.stdout) == (1, "")
        assert none.stderr.endswith("stopped by SIGTERM before any policy was found that fits\n")
