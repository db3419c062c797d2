# SPDX-License-Identifier: Apache-2.0
"""`thinwire tools`."""

import json

from thinwire.cli import main
from thinwire.core.comm.mailbox import zeromq
from thinwire.core.kernels import base, native, nearest
from thinwire.errors import ConfigError


def rows(capsys):
    assert main(["tools", "--json"]) == 0
    return {row["for"]: row for row in json.loads(capsys.readouterr().out)}


def test_tools_lists_what_runs_and_where_it_lies(capsys):
    found = rows(capsys)
    assert len(found) == 5
    library = base._compiled()
    if library is not None:
        assert found["codes, sketches, arrays of models"]["runs"] == "C"
        assert found["codes, sketches, arrays of models"]["details"] == library._name
    assert main(["tools"]) == 0
    text = capsys.readouterr().out
    assert all(row["runs"].split()[0] in text for row in found.values())


def test_tools_says_why_the_fast_path_is_not_taken(capsys, monkeypatch, tmp_path):
    def missing():
        raise ConfigError("pip install 'thinwire[async]'")

    monkeypatch.setattr(zeromq, "import_zmq", missing)
    monkeypatch.setattr(native, "problems", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    base._compiled.cache_clear()
    nearest._compiled.cache_clear()
    native.warn_of_slow_path.cache_clear()
    try:
        found = rows(capsys)
        for name in ("codes, sketches, arrays of models", "selection of coresets"):
            assert (found[name]["runs"], found[name]["details"]) == (
                "PyTorch, slower",
                "no C compiler was found. Install gcc or clang",
            )
        assert found["messages of asynchronous methods"]["details"] == "pip install 'thinwire[async]'"
        assert main(["tools"]) == 0
        assert "[async]" in capsys.readouterr().out
        monkeypatch.setenv("THINWIRE_NATIVE", "0")
        assert rows(capsys)["selection of coresets"]["details"] == "THINWIRE_NATIVE=0"
    finally:
        # What was found without a compiler must not be what later tests find.
        base._compiled.cache_clear()
        nearest._compiled.cache_clear()
        native.warn_of_slow_path.cache_clear()
