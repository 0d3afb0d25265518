"""Reading traces: what writers really write, every way a file can be damaged, and memory that does not grow with it."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import GEMM, Timeline

from kernelguard.errors import InputError
from kernelguard.trace.recording import record
from kernelguard.trace.stream import BAD_EVENTS, TraceStream


def small() -> Timeline:
    line = Timeline()
    of = line.op("aten::mm", 0, 30)
    line.kernel(GEMM, 40, 20, launched=10, of=of)
    line.op('odd "name" \\ with }, { signs \u00b5', 50, 5)
    return line


def kineto(events: list[str]) -> str:
    """As kineto lays a file out."""
    return (
        '\n  {\n    "schemaVersion": 1,\n  "traceEvents": [\n' + ",\n".join(events) + '\n  ],\n  "traceName": "t"\n}\n'
    )


EVENT = '  {\n    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 1, "tid": 1,\n    "ts": 5.5, "dur": 2.0\n  }'


def read(path: Path, text: str | bytes, **options: int) -> tuple[list[str], TraceStream]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    stream = TraceStream(path, **options)
    return [event["name"] for event in stream], stream


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.json"


def test_what_stands_beside_the_events_is_kept(file: Path) -> None:
    _, stream = read(file, kineto([EVENT % "a"]))
    assert stream.header == {"schemaVersion": 1, "traceName": "t"}


@settings(max_examples=60, deadline=None)
@given(block=st.integers(1, 400), indent=st.sampled_from([None, 1]))
def test_where_blocks_end_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, block: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("s") / "t.json"
    document = {"a": 12, "traceEvents": small().events, "b": [1, 2.5, {}]}
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    names, stream = read(path, text, block=block)
    assert names == [event["name"] for event in small().events]
    assert stream.header == {"a": 12, "b": [1, 2.5, {}]}
    assert stream.skipped == 0


def test_numbers_that_json_does_not_know_are_read(file: Path) -> None:
    odd = '"args": {"x": NaN, "y": -Infinity, "bytes": Infinity}}'
    file.write_text(kineto(['{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, ' + odd]))
    assert record(file).device.duration[0] == 2.0


def test_control_characters_in_names_are_read(file: Path) -> None:
    assert read(file, kineto([EVENT % "a\tb\x01c"]))[0] == ["a\tb\x01c"]


@pytest.mark.parametrize("bad", ['say "hi"', "C:\\Users\\x", 'end"'])
def test_an_event_that_is_no_json_is_left_out_and_counted(file: Path, bad: str) -> None:
    names, stream = read(file, kineto([EVENT % "a", EVENT % bad, EVENT % "c", EVENT % "d"]))
    assert names == ["a", "c", "d"]
    assert stream.skipped == 1


def test_a_file_full_of_bad_events_is_another_kind_of_file(file: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(file, kineto([EVENT % 'say "hi"'] * (BAD_EVENTS + 2)))


def test_a_comma_after_the_last_event_is_forgiven(file: Path) -> None:
    assert read(file, '{"traceEvents": [' + EVENT % "a" + ",\n]}")[0] == ["a"]


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    """Never is a part of a trace taken for the whole."""
    text = small().write(file).read_bytes()
    for end in range(len(text)):
        with pytest.raises(InputError, match=r"t\.json") as caught:
            read(file, text[:end])
        assert caught.value.hint
    assert len(read(file, text)[0]) == len(small().events)


def test_a_compressed_file_cut_anywhere_is_refused(file: Path) -> None:
    text = gzip.compress(small().write(file).read_bytes())
    for end in range(2, len(text)):
        with pytest.raises(InputError, match="damaged gzip"):
            read(file, text[:end])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"  \n ", "empty"),
        (b"PK\x03\x04 a zip", "begins with"),
        (b"\x80\x81\x82", "not UTF-8"),
        (b"{}", "no list of trace events"),
        (b'{"traceEvents": {}}', "no list of trace events"),
        (b'{"traceEvents": 5}', "no list of trace events"),
        (b"[" * 100_000, "in the middle|recursion"),
    ],
)
def test_what_is_no_trace_is_refused(file: Path, content: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(file, content)


def test_a_trace_of_another_tool_is_told(file: Path) -> None:
    """Chrome's own and Perfetto's have the same form, and nothing of torch in it."""
    events = [
        {"ph": "X", "cat": "toplevel", "name": "ThreadControllerImpl::RunTask", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    ]
    file.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(InputError, match=r"1 events, but no operator and no kernel of torch\.profiler"):
        record(file)


def test_python_stacks_are_counted_and_passed_over(file: Path) -> None:
    frame = '{"ph": "X", "cat": "python_function", "name": "a.py(1): f", "pid": 1, "tid": 1, "ts": 1, "dur": 2}'
    file.write_text(kineto([EVENT % "a", frame, frame]))
    found = record(file)
    assert (found.python_frames, len(found.host)) == (2, 1)


@pytest.mark.thorough
def test_memory_is_bounded(tmp_path: Path) -> None:
    """Forty times the file costs a few times the columns, and not the document."""
    line = small()
    one = json.dumps(line.events)[1:-1]
    peaks = []
    for turns in (1, 60_000):
        path = tmp_path / f"{turns}.json"
        with path.open("w") as out:
            out.write('{"traceEvents": [')
            for turn in range(turns):
                out.write((", " if turn else "") + one)
            out.write("]}")
        code = (
            "import sys, resource; from pathlib import Path; from kernelguard.trace.profile import profile; "
            "profile(Path(sys.argv[1])); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)
        size = path.stat().st_size
    assert size > 30_000_000
    assert peaks[1] - peaks[0] < 1.5 * size
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
