"""Is a place in a bundle found in its sources?"""

from __future__ import annotations

import json
from pathlib import Path

from tandem_client.cli.worker_source_map import SourceMap

FOLDER = Path("/somewhere/worker")
# Line 1 of the bundle: column 0 is 0:0 of a.ts, column 4 is 2:8 of b.ts. Line 3: column 2 is 18:7 of b.ts, one back.
MAPPINGS = "AAAA,ICEQ;;EAgBD"
MAP = json.dumps({"version": 3, "sources": ["../tandem_worker/src/a.ts", "/else/b.ts"], "mappings": MAPPINGS})


def test_a_place_is_that_of_the_last_mapping_before_it() -> None:
    located = SourceMap(MAP, FOLDER.parent / "bundle", FOLDER).located
    assert located("    at f (index.js:1:1)") == "    at f (src/a.ts:1:1)"
    assert located("    at f (index.js:1:4)") == "    at f (src/a.ts:1:1)"
    assert located("index.js:1:5, index.js:3:99") == "/else/b.ts:3:9, /else/b.ts:19:8"


def test_what_no_mapping_tells_stays() -> None:
    located = SourceMap(MAP, FOLDER.parent / "bundle", FOLDER).located
    for line in ("at index.js:2:1", "at index.js:3:2", "at index.js:9:1", "at src/index.js:1:1", "no place at all"):
        assert located(line) == line


def test_lines_before_the_bundle_are_counted() -> None:
    located = SourceMap(MAP, FOLDER.parent / "bundle", FOLDER, num_lines_before=2).located
    assert (located("index.js:3:1"), located("index.js:1:1")) == ("src/a.ts:1:1", "index.js:1:1")
