"""TokenSpeed's flags: translated, refused with the reason, or an error in one line; the documentation says the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from moonpool_worker.cli.app import app
from moonpool_worker.cli.tokenspeed import TABLE, FlagError, translate

DOCS = Path(__file__).parents[3] / "docs/tokenspeed-flags.md"
_HEAD = """# TokenSpeed's flags

`moonpool-worker serve` takes TokenSpeed's command line (version 0.1.1): what has an equivalent here is translated, what
is so anyway is taken, and everything else is refused with a sentence that names the flag. Nothing is ignored. Flags of
the same name in both (`--host`, `--port`, `--dtype`, `--max-model-len`, `--prefix-granularity`, `--block-size`,
`--attention-backend`, `--quantization`, `--weight-version`, `--kv-events-config`) are not in the table; values that are
not possible here are refused too. An option that is given under both names is an error.

| flag of TokenSpeed | here |
| --- | --- |
"""


def own_options() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for param in command.params for name in [*param.opts, *param.secondary_opts] if name.startswith("--")}


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (["m", "--max-num-seqs", "8"], ["m", "--max-running", "8"]),
        (["m", "--max-num-seqs=8"], ["m", "--max-running", "8"]),
        (["--model", "m"], ["m"]),
        (["m", "--chunked-prefill-size", "2048"], ["m", "--max-batch-tokens", "2048"]),
        (["m", "--disable-prefix-caching"], ["m", "--no-prefix-caching"]),
        (["m", "--kvstore-size", "2"], ["m", "--l2-size", "2000000000"]),
        (["m", "--kvstore-size", "0", "--kvstore-ratio", "1.5"], ["m", "--l2-ratio", "1.5"]),
        (["m", "--disable-kvstore"], ["m", "--l2-size", "0"]),
        (["m", "--kvstore-prefetch-timeout-base-s", "1.5"], ["m", "--prefetch-timeout-base", "1500ms"]),
        (["m", "--kv-cache-dtype", "auto", "--enable-metrics", "--tp", "1"], ["m"]),
        (["m", "--served-model-name", "--odd"], ["m", "--served-name", "--odd"]),
        (
            [
                "m", "--kvstore-storage-backend", "mooncake", "--kvstore-storage-backend-extra-config",
                '{"master_server_address": "h:1", "tenant_id": "t", "protocol": "tcp", "global_segment_size": 0}',
            ],
            ["m", "--l3-master", "h:1", "--l3-tenant", "t", "--l3-protocol", "tcp"],
        ),
        (["m", "--max-running", "4", "--port", "1"], ["m", "--max-running", "4", "--port", "1"]),
    ],
)  # fmt: skip
def test_what_has_an_equivalent_is_translated(given: list[str], becomes: list[str]) -> None:
    assert translate(["serve", *given]) == ["serve", *becomes]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--max-running", "8", "--max-num-seqs", "8"], "--max-running and --max-num-seqs both set --max-running"),
        (["--max-num-seqs", "8", "--max-running=8"], "--max-num-seqs and --max-running both set --max-running"),
        (["--disable-kvstore", "--kvstore-size", "8"], "--disable-kvstore and --kvstore-size both set --l2-size"),
        (["--enable-prefix-caching", "--no-prefix-caching"], "both set --prefix-caching"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: only auto is possible here: KV has the data type"),
        (["--tensor-parallel-size", "8"], "--tensor-parallel-size 8: only 1 is possible here"),
        (["--trust-remote-code"], "--trust-remote-code: no code of a checkpoint is ever run"),
        (["--chunked-prefill-size", "-1"], "--chunked-prefill-size -1: -1 cannot be honoured"),
        (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization 0.9: give L1's size in --l1-size"),
        (["--kvstore-size", "lots"], "--kvstore-size lots: 'lots' is no number"),
        (["--kvstore-storage-backend", "memory"], "--kvstore-storage-backend memory: 'memory' is not possible here"),
        (["--kvstore-storage-backend-extra-config", "{"], "it is not valid JSON"),
        (["--kvstore-storage-backend-extra-config", "{}"], "master_server_address is missing"),
        (
            ["--kvstore-storage-backend-extra-config", '{"global_segment_size": "4gb"}'],
            "a worker gives the store no memory",
        ),
        (["--kvstore-storage-backend-extra-config", '{"x": 1}'], "the key 'x' is not known"),
        (["--max-num-seqs"], "--max-num-seqs: its value is missing"),
        (["--enable-metrics=yes"], "--enable-metrics: it takes no value"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(given: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(FlagError) as caught:
        translate(["serve", "m", *given])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_commands_are_left_alone() -> None:
    assert translate(["drain", "--tp", "8"]) == ["drain", "--tp", "8"]
    assert translate([]) == []


def test_no_row_hides_an_option_of_ours_and_no_flag_has_two_rows() -> None:
    names = [row.flag for row in TABLE]
    assert len(set(names)) == len(names)
    assert not set(names) & own_options()


def test_every_translation_is_an_option_that_there_is() -> None:
    options = own_options()
    values = {"--kvstore-storage-backend-extra-config": '{"master_server_address": "h:1", "tenant_id": "t"}'}
    for row in TABLE:
        try:
            result = row.becomes(values.get(row.flag, "7"))
        except ValueError:
            continue
        assert {word for word in result if word.startswith("--")} <= options, row.flag


def test_a_refusal_ends_the_process_before_anything_is_loaded() -> None:
    command = [sys.executable, "-m", "moonpool_worker", "serve", "smollm2", "--no-supervise", "--nnodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "moonpool-worker: --nnodes 2: only 1 is possible here: a replica is one process on one device here; more "
        "throughput is more replicas"
    ]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kvstore-size", "inf"),
        ("--kvstore-storage-backend-extra-config", "[" * 100_000),
    ],
)
def test_a_hostile_value_is_refused_in_a_sentence(flag: str, value: str) -> None:
    with pytest.raises(FlagError, match=flag):
        translate(["serve", "m", flag, value])


def test_the_documentation_is_the_table() -> None:
    """Set UPDATE_DOCS=1 to write it anew."""
    text = _HEAD + "".join(f"| `{row.flag}` | {row.meaning} |\n" for row in TABLE)
    if os.environ.get("UPDATE_DOCS"):
        DOCS.write_text(text)
    assert DOCS.read_text() == text
