"""Is a wrangler file understood as wrangler does, and what is not here refused by name?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_client.cli import worker_capnp
from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import Assets, ConfigUnusable, WorkerConfig, read_config
from tandem_client.cli.worker_modules import Module, modules_of

JSONC = """{
  // a comment
  "main": "src/index.js", /* another */
  "compatibility_date": "2026-11-01",
  "compatibility_flags": ["nodejs_compat"],
  "ai": { "binding": "MIND", },
  "vars": { "URL": "http://x//y" },
  "kv_namespaces": [],
  "env": { "staging": { "ai": { "binding": "OTHER" }, "compatibility_date": "2026-10-01" } },
}"""


def folder(tmp_path: Path, text: str = JSONC, name: str = "wrangler.jsonc", **files: str) -> Path:
    (tmp_path / name).write_text(text)
    for path, content in {"src/index.js": "export default {};", **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    return tmp_path


def test_comments_and_trailing_commas_are_json_here(tmp_path: Path) -> None:
    config = read_config(folder(tmp_path))
    assert (config.main, config.compatibility_date) == (tmp_path / "src/index.js", "2026-11-01")
    assert (config.ai_binding, config.variables, config.ignored) == ("MIND", {"URL": "http://x//y"}, ())
    assert config.compatibility_flags == ("nodejs_compat",)


def test_an_environment_inherits_settings_but_no_bindings(tmp_path: Path) -> None:
    config = read_config(folder(tmp_path), "staging")
    assert (config.ai_binding, config.compatibility_date, config.variables) == ("OTHER", "2026-10-01", {})
    assert config.compatibility_flags == ("nodejs_compat",)
    with pytest.raises(ConfigUnusable, match="no environment 'live'; it has staging"):
        read_config(tmp_path, "live")


def test_secrets_go_before_variables_and_an_environment_may_have_its_own(tmp_path: Path) -> None:
    text = """
# a comment
KEY=plain # and another
export QUOTED="two\\nlines \\"said\\" # no comment"
SINGLE='as $it \\n is'
EMPTY=
URL=http://x/#part
"""
    folder(tmp_path, **{".dev.vars": text})
    assert read_config(tmp_path).variables == {
        "URL": "http://x/#part",
        "KEY": "plain",
        "EMPTY": "",
        "QUOTED": 'two\nlines "said" # no comment',
        "SINGLE": "as $it \\n is",
    }
    (tmp_path / ".dev.vars.staging").write_text("KEY=other")
    assert read_config(tmp_path, "staging").variables == {"KEY": "other"}
    (tmp_path / ".dev.vars").write_text("KEY=1\nnonsense")
    with pytest.raises(ConfigUnusable, match=r"line 2 of .* is not NAME=VALUE"):
        read_config(tmp_path)


def test_wrangler_json_goes_before_jsonc_before_toml(tmp_path: Path) -> None:
    folder(tmp_path, 'main = "src/index.js"\ncompatibility_date = "2025-01-01"', "wrangler.toml")
    assert read_config(tmp_path).compatibility_date == "2025-01-01"
    folder(tmp_path)
    assert read_config(tmp_path).compatibility_date == "2026-11-01"
    folder(tmp_path, '{"main": "src/index.js", "compatibility_date": "2024-01-01"}', "wrangler.json")
    assert read_config(tmp_path).compatibility_date == "2024-01-01"


UNSUPPORTED = """
main = "src/index.js"
compatibility_date = "2026-11-01"
route = "example.com/*"
durable_objects = { bindings = [{ name = "D", class_name = "D" }] }
[[kv_namespaces]]
binding = "KV"
[assets]
directory = "src"
not_found_handling = "single-page-application"
html_handling = "auto-trailing-slash"
run_worker_first = ["/api/*"]
"""


def test_what_there_is_not_here_is_refused_by_name_or_left_out_aloud(tmp_path: Path) -> None:
    folder(tmp_path, UNSUPPORTED, "wrangler.toml")
    with pytest.raises(ConfigUnusable) as refused:
        read_config(tmp_path)
    names = (
        *("durable_objects", "kv_namespaces", "assets.not_found_handling = 'single-page-application'"),
        "assets.run_worker_first = ['/api/*']",
    )
    assert all(name in str(refused.value) for name in (*names, "--ignore-unsupported"))
    assert "route" not in str(refused.value).replace("run_worker_first", "")
    config = read_config(tmp_path, ignore_unsupported=True)
    assert set(config.ignored) == set(names) and config.assets == Assets(tmp_path / "src")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "is not an object"),
        ('{"compatibility_date": "2026-11-01"}', "names no main and no assets"),
        ('{"main": "no.js", "compatibility_date": "2026-11-01"}', "main = 'no.js', and there is no such file"),
        ('{"main": "src/index.js"}', "has no compatibility_date"),
        ('{"assets": {"directory": "dist"}, "compatibility_date": "2026-11-01"}', "build the assets first"),
    ],
)
def test_a_file_that_cannot_be_run_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigUnusable, match=complaint):
        read_config(folder(tmp_path, text))


def test_a_folder_without_a_file_is_not_a_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigUnusable, match="none of wrangler"):
        read_config(tmp_path)


def test_modules_are_what_is_imported_the_main_one_first(tmp_path: Path) -> None:
    main = """
        // import "not-this-one";
        import page from "./page.html";
        export { a } from "../lib/a.js";
        import { env } from "cloudflare:workers";
        const later = () => import("./later.mjs");
    """
    files = {"src/index.js": main, "src/page.html": "<p>", "lib/a.js": 'import "../src/index.js";', "src/later.mjs": ""}
    config = read_config(folder(tmp_path, **files))
    assert [(module.name, module.kind) for module in modules_of(config)] == [
        ("src/index.js", "esModule"),
        ("src/page.html", "text"),
        ("lib/a.js", "esModule"),
        ("src/later.mjs", "esModule"),
    ]


def test_what_must_be_bundled_names_the_remedy_where_esbuild_is_not(tmp_path: Path) -> None:
    config = read_config(folder(tmp_path, **{"src/index.js": 'import "ai";'}))
    with pytest.raises(ConfigUnusable, match=r"imports 'ai', .* so .* `npm install --save-dev esbuild`"):
        modules_of(config)


def test_rules_say_which_files_are_modules_of_a_kind(tmp_path: Path) -> None:
    text = JSONC.replace('"vars"', '"rules": [{"type": "Data", "globs": ["**/*.dat", "src/*.json"]}], "vars"')
    main = 'import "./x.dat"; import "./y.json"; import "./z.xyz";'
    config = read_config(
        folder(tmp_path, text, **{"src/index.js": main, "src/x.dat": "", "src/y.json": "", "src/z.xyz": ""})
    )
    with pytest.raises(ConfigUnusable, match=r"src/z\.xyz is imported, and no rule"):
        modules_of(config)
    (tmp_path / "src/index.js").write_text(main.replace('import "./z.xyz";', ""))
    assert [module.kind for module in modules_of(config)] == ["esModule", "data", "data"]


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://127.0.0.1:8642", '(address = "127.0.0.1:8642", http = ('),
        ("http://[::1]:80", '(address = "[::1]:80", http = ('),
        ("https://ai.example", '(address = "ai.example:443", https = (options = ('),
    ],
)
def test_the_gateway_is_any_address(tmp_path: Path, url: str, wanted: str) -> None:
    config = WorkerConfig(tmp_path, tmp_path, tmp_path / "a.js", "2026-11-01", ai_binding="AI")
    written = worker_capnp.write(tmp_path, config, [Module("a.js", "esModule", b"")], Upstream(url)).read_text()
    assert wanted in written and "authorization" not in written
    with pytest.raises(ConfigUnusable, match="an address without a path"):
        worker_capnp.write(tmp_path, config, [], Upstream("http://x/v1"))
