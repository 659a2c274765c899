"""Is a wrangler file understood as wrangler does, and what is not here refused by name?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_client.cli import worker_capnp
from tandem_client.cli.worker_assets import Assets, HeaderRule, Redirect
from tandem_client.cli.worker_bundle import modules_of
from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig, read_config
from tandem_client.cli.worker_modules import Module

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
    (tmp_path / ".dev.vars").write_text('KEY=1\nPEM="two\nlines"\nnonsense')
    with pytest.raises(ConfigUnusable, match=r"line 4 of .* is not NAME=VALUE"):
        read_config(tmp_path)


def test_where_there_are_no_dev_vars_each_env_file_goes_over_the_more_general_ones(tmp_path: Path) -> None:
    files = {
        ".env": "A=1\nB=1\nC=1\nD=1\nPEM='-----BEGIN\nKEY-----'  # two lines",
        ".env.staging": "B=2\nC=2\nD=2",
        ".env.local": "C=3\nD=3",
        ".env.staging.local": "D=`4`",
    }
    folder(tmp_path, **files)
    pem = {"PEM": "-----BEGIN\nKEY-----"}
    assert read_config(tmp_path, "staging").variables == {"A": "1", "B": "2", "C": "3", "D": "4", **pem}
    assert read_config(tmp_path).variables == {"URL": "http://x//y", "A": "1", "B": "1", "C": "3", "D": "3", **pem}
    (tmp_path / ".dev.vars").write_text("A=5")
    assert read_config(tmp_path).variables == {"URL": "http://x//y", "A": "5"}


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
durable_objects = { bindings = [{ name = "ROOMS", class_name = "Room" }] }
browser = { binding = "CHROME" }
[[kv_namespaces]]
binding = "CACHE"
[[kv_namespaces]]
binding = "USERS"
[assets]
directory = "src"
not_found_handling = "a-nice-page"
pages_from = "x"
"""


def test_what_there_is_not_here_is_refused_by_name_or_left_out_aloud(tmp_path: Path) -> None:
    folder(tmp_path, UNSUPPORTED, "wrangler.toml")
    with pytest.raises(ConfigUnusable) as refused:
        read_config(tmp_path)
    names = (
        *("durable_objects (ROOMS)", "browser (CHROME)", "kv_namespaces (CACHE, USERS)"),
        *("assets.pages_from", "assets.not_found_handling = 'a-nice-page'"),
    )
    assert all(name in str(refused.value) for name in (*names, "--ignore-unsupported"))
    assert "route" not in str(refused.value)
    config = read_config(tmp_path, ignore_unsupported=True)
    assert set(config.ignored) == set(names) and config.assets == Assets(tmp_path / "src", prefers_navigation=True)


REDIRECTS = """
# a comment
/old /new
/blog/* /posts/:splat 301
/app/* /index.html 200
/x /y 404
https://example.com/z /z
"""
HEADERS = """
/*
  X-Frame-Options: DENY
  ! Cache-Control
https://example.com/*
  X-Other: host
nonsense
/team/:name
  # a comment
  X-Name: :name
"""


def test_assets_have_rules_of_their_own(tmp_path: Path) -> None:
    config = """{"compatibility_date": "2025-01-01", "main": "src/index.js", "assets": {
        "directory": "dist", "html_handling": "none", "not_found_handling": "404-page",
        "run_worker_first": ["/api/*", "!/api/docs/*"]}}"""
    files = {"dist/_redirects": REDIRECTS, "dist/_headers": HEADERS}
    assets = read_config(folder(tmp_path, config, **files)).assets
    assert assets is not None and not assets.prefers_navigation and not assets.worker_first
    assert assets.redirects == (
        Redirect("/old", "/new", 302),
        Redirect("/blog/*", "/posts/:splat", 301),
        Redirect("/app/*", "/index.html", 200),
    )
    assert assets.headers == (
        HeaderRule("/*", (("X-Frame-Options", "DENY"),), ("Cache-Control",)),
        HeaderRule("/team/:name", (("X-Name", ":name"),)),
    )
    assert assets.rules()["workerFirst"] == ["/api/*"] and assets.rules()["workerNever"] == ["/api/docs/*"]
    assert [note.partition(":")[0] for note in assets.notes] == [
        "line 6 of _redirects changes nothing",
        "line 7 of _redirects changes nothing",
        "line 7 of _headers changes nothing",
    ]
    with pytest.raises(
        ConfigUnusable, match=r'run_worker_first is \[\'api\'\]; give true, false, or paths such as "/api/'
    ):
        read_config(folder(tmp_path, config.replace('["/api/*", "!/api/docs/*"]', '["api"]')))


def test_only_declared_secrets_arrive_and_missing_ones_are_named(tmp_path: Path) -> None:
    text = JSONC.replace('"kv_namespaces": []', '"secrets": {"required": ["KEY", "TOKEN"]}')
    config = read_config(folder(tmp_path, text, **{".dev.vars": "KEY=1\nOTHER=2"}))
    assert config.variables == {"URL": "http://x//y", "KEY": "1"} and config.secrets == {"KEY"}
    assert config.notes == ("the secret TOKEN is missing: add TOKEN=... to .dev.vars",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "is not an object"),
        ('{"compatibility_date": "2026-11-01"}', "names no main and no assets"),
        ('{"main": "no.js", "compatibility_date": "2026-11-01"}', "main = 'no.js', and there is no such file"),
        ('{"main": "src/index.js"}', "has no compatibility_date"),
        ('{"main": "src/entry.py"}', "Python does not run here"),
        ('{"main": 5}', "main is 5; it must be a text in quotes"),
        ('{"compatibility_flags": "nodejs_compat"}', 'compatibility_flags is "nodejs_compat"; it must be a list'),
        ('{"ai": {}}', "ai has no binding; add it"),
        ('{"ai": true}', "ai is true; it must be a table"),
        ('{"rules": [{"type": "Text", "globs": "*.x"}]}', r'rules\[0\]\.globs is "\*\.x"; it must be a list'),
        ('{"assets": "dist"}', "assets is .*; it must be a table"),
        ('{"env": {"live": 5}}', r"env\.live is 5; it must be a table"),
        ('{"assets": {"directory": "dist"}, "compatibility_date": "2026-11-01"}', "build the assets first"),
    ],
)
def test_a_file_that_cannot_be_run_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigUnusable, match=complaint):
        read_config(folder(tmp_path, text, **{"src/entry.py": ""}))


def test_a_date_of_toml_is_no_text_and_null_is_nothing(tmp_path: Path) -> None:
    toml = folder(tmp_path, 'main = "src/index.js"\ncompatibility_date = 2026-11-01', "wrangler.toml")
    with pytest.raises(ConfigUnusable, match="compatibility_date is 2026-11-01; it must be a text in quotes"):
        read_config(toml)
    text = '{"main": "src/index.js", "compatibility_date": "2026-11-01", "rules": null, "ai": null}'
    assert read_config(folder(tmp_path, text, "wrangler.json")).rules == ()


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


PACKAGES = {
    "node_modules/maths/package.json": '{"exports": {".": {"types": "./x", "import": "./m.js"}, "./*": "./lib/*.js"}}',
    "node_modules/maths/m.js": 'export { sum as default } from "./lib/sum"; export * from "@deep/one";',
    "node_modules/maths/lib/sum.js": "export const sum = (...all) => all.length;",
    "node_modules/maths/lib/text.js": "export const text = 'import \"no-package\"';",
    "node_modules/@deep/one/package.json": '{"module": "./es/index.mjs", "main": "./index.js"}',
    "node_modules/@deep/one/es/index.mjs": "export const one = 1;",
    "node_modules/@deep/one/index.js": "module.exports.one = 1;",
    "node_modules/old/package.json": "{}",
    "node_modules/old/index.js": 'exports.fs = require("fs"); exports.b = require("./its"); 0&&(module.exports={a});',
    "node_modules/old/its.js": "module.exports = () => 1;",
}


def passes_on(module: str) -> str:
    return f"import * as all from {module};\nexport * from {module};\nexport default all.default;\n"


def test_packages_run_without_a_bundler_too(tmp_path: Path) -> None:
    main = (
        'import sum from "maths"; import { text } from "maths/text"; import { one } from "@deep/one"; import "./lib";'
    )
    files = {"src/index.js": main, "src/lib.js": 'import "events"; import "old";', **PACKAGES}
    modules = modules_of(read_config(folder(tmp_path, **files)))
    found = {module.name: module.content.decode() for module in modules}
    assert next(iter(found)) == "src/index.js"
    assert found["src/maths"] == passes_on('"/node_modules/maths/m.js"')
    assert found["src/maths/text"] == passes_on('"/node_modules/maths/lib/text.js"')
    assert found["src/@deep/one"] == passes_on('"/node_modules/@deep/one/es/index.mjs"')
    assert found["src/lib"] == passes_on('"/src/lib.js"')
    assert found["src/events"] == passes_on('"node:events"')
    assert found["node_modules/maths/lib/sum"] == passes_on('"/node_modules/maths/lib/sum.js"')
    old = next(module for module in modules if module.name == "node_modules/old/index.js")
    assert (old.kind, old.exports) == ("commonJsModule", ("a", "b", "fs"))
    assert found["src/old"] == passes_on('"/node_modules/old/index.js"')
    assert found["node_modules/old/its"] == 'module.exports = require("/node_modules/old/its.js");\n'
    assert found["node_modules/old/fs"] == 'module.exports = require("node:fs");\n'


@pytest.mark.parametrize(
    ("main", "complaint"),
    [
        ('import "ai";', r"src/index\.js imports 'ai', and ai is not installed: run `npm install ai`"),
        ('import "@a/b/c";', r"@a/b is not installed: run `npm install @a/b`"),
        ('import "./no.js";', r"src/index\.js imports '\./no\.js', and there is no such file"),
        ('import "./typed";', r"'\./typed', which is TypeScript or JSX, so .* `npm install --save-dev esbuild`"),
        ('import "maths/none";', r"maths/none is no file of its package"),
    ],
)
def test_what_cannot_be_imported_names_the_remedy(tmp_path: Path, main: str, complaint: str) -> None:
    files = {"src/index.js": main, "src/typed.ts": "", **PACKAGES}
    with pytest.raises(ConfigUnusable, match=complaint):
        modules_of(read_config(folder(tmp_path, **files)))


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
