"""Tests what `tandem chat` sends, shows and stores, from a pipe and on a pseudo-terminal."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tandem_client.cli.chat import Answer, Conversation, Turn
from tandem_client.cli.chat_view import MAX_MESSAGES, History, visible
from tests.tandem_client.chat_terminal import TalkingStub, chatting
from tests.tandem_client.serving import serve
from tests.tandem_client.stub_gateway import StubGateway


@pytest.fixture
def gateway() -> Iterator[TalkingStub]:
    stub = TalkingStub()
    with serve(stub.app()) as stub.url:
        yield stub


def piped(gateway: StubGateway, text: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["chat", "--url", gateway.url, *arguments], input=text)


def test_each_question_comes_with_the_whole_conversation(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path, "--system", "Be brief.", "--temperature", "0", "--seed", "7") as terminal:
        assert f"@tandem/demo · {gateway.url} · /help" in terminal.screen
        assert terminal.say("Hi").startswith("(2) You said Hi")
        assert terminal.say("What did I say?").startswith("(4) You said What did I say?")
    assert gateway.sent == [
        ["Be brief.", "Hi"],
        ["Be brief.", "Hi", "(2) You said Hi", "What did I say?"],
    ]
    body = gateway.calls[0].body
    assert (body["stream"], body["temperature"], body["seed"]) == (True, 0.0, 7)
    assert "max_tokens" not in body


def test_below_an_answer_stand_its_tokens_and_its_pace(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path, "--max-tokens", "3") as terminal:
        shown = terminal.say("Hi")
        assert "4 prompt tokens (2 cached) · 3 new, cut: raise --max-tokens · " in shown
        assert re.search(r"· [\d.]+ tokens/s · TTFT \d+ ms$", shown)
        assert b"\033[2m4 prompt tokens" in terminal.raw, "it is dim"


def test_thinking_is_dim_before_the_answer_and_no_part_of_the_conversation(
    gateway: TalkingStub, tmp_path: Path
) -> None:
    with chatting(gateway, tmp_path) as terminal:
        assert "What did they\u241b[2J say?\n\n(1) You said think" in terminal.say("think").replace("\r", "")
        assert b"\033[2mWhat did \033[0m" in terminal.raw, "it is dim"
        terminal.say("Hi")
    assert gateway.sent[-1] == ["think", "(1) You said think", "Hi"]


def test_a_pipe_gets_answers_without_thinking(gateway: TalkingStub) -> None:
    assert piped(gateway, "think\n").stdout == "(1) You said think\n"


def test_reset_forgets_and_retry_asks_again(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path, "--system", "s") as terminal:
        terminal.say("one")
        assert "is empty" in terminal.say("/reset")
        terminal.say("two")
        terminal.say("three")
        terminal.say("/retry")
    last = ["s", "two", "(2) You said two", "three"]
    assert gateway.sent == [["s", "one"], ["s", "two"], last, last]


def test_models_are_listed_and_switched_and_an_unknown_one_changes_nothing(
    gateway: TalkingStub, tmp_path: Path
) -> None:
    with chatting(gateway, tmp_path) as terminal:
        assert terminal.say("/model").split("\n") == ["* @tandem/demo", "  @tandem/other"]
        assert "no model gpt is served here; there is @tandem/demo, @tandem/other" in terminal.say("/model gpt")
        terminal.say("to the first")
        assert "@tandem/other answers from now on" in terminal.say("/model @tandem/other")
        terminal.say("to the second")
    assert [call.path.partition("/run/")[2] for call in gateway.calls] == ["@tandem/demo", "@tandem/other"]
    assert gateway.sent[1][0] == "to the first"


def test_ctrl_c_in_mid_answer_ends_that_answer_and_the_chat_goes_on(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.send("go on for ever\r")
        terminal.until("and on")
        terminal.send("\x03")
        assert "stopped; what came so far stays" in terminal.until("› ")
        assert gateway.client_left.wait(20), "the connection is closed, so that the server stops"
        assert terminal.say("thanks").startswith("(3) You said thanks")
    assert [gateway.sent[1][0], gateway.sent[1][2]] == ["go on for ever", "thanks"]
    assert gateway.sent[1][1].startswith("(1) and on ")


def test_ctrl_c_before_the_first_token_takes_the_question_back(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.send("say nothing\r")
        terminal.until("…")
        terminal.send("\x03")
        assert "stopped before the first token" in terminal.until("› ")
        terminal.say("Hi")
    assert gateway.sent[-1] == ["Hi"]


def test_an_error_is_red_with_its_remedy_and_the_question_is_not_remembered(
    gateway: TalkingStub, tmp_path: Path
) -> None:
    with chatting(gateway, tmp_path) as terminal:
        assert "/retry asks again; the server asks to wait 7 s" in terminal.say("too much")
        assert b"\033[31m3040: Capacity temporarily exceeded" in terminal.raw
        assert "without [DONE]" in terminal.say("break off")
        terminal.say("Hi")
        assert "/reset forgets the conversation" in terminal.say("too long")
        assert "has no chat template" in terminal.say("no template")
        terminal.say("/reset")
        assert "has no chat template" in terminal.say("/retry")
    assert gateway.sent[2:] == [
        ["Hi"],
        ["Hi", "(1) You said Hi", "too long"],
        ["Hi", "(1) You said Hi", "no template"],
        ["no template"],
    ]


def test_a_server_that_goes_away_ends_no_chat(tmp_path: Path) -> None:
    stub = TalkingStub()
    with ExitStack() as afterwards:
        with serve(stub.app()) as stub.url:
            terminal = afterwards.enter_context(chatting(stub, tmp_path))
            terminal.say("Hi")
        output = terminal.say("still there?")
        assert f"no Tandem at {stub.url}; start one with `tandem up`\n/retry asks again" in output
        assert terminal.say("/model").endswith("start one with `tandem up`")
        assert "/reset" in terminal.say("/help")


@pytest.mark.parametrize("keys", ["\x04", "/quit\r", "/exit\r", "/bye\r"])
def test_ctrl_d_and_quit_leave(gateway: TalkingStub, tmp_path: Path, keys: str) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.send(keys)
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.screen


def test_ctrl_c_at_the_prompt_clears_the_line_and_twice_leaves(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.send("half a thou")
        terminal.until("half a thou")
        terminal.interrupt("Ctrl-C again leaves")
        terminal.until("› ")
        terminal.say("Hi")
        terminal.interrupt("Ctrl-C again leaves")
        terminal.until("› ")
        terminal.interrupt("\n")
        assert terminal.exit_code() == 0
    assert gateway.sent == [["Hi"]]


def test_messages_of_earlier_chats_are_an_arrow_away_and_private(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.send("first line\\\r")
        terminal.until("… ")
        terminal.send("second line\r")
        terminal.until("› ")
        terminal.say("the other")
    with chatting(gateway, tmp_path) as terminal:
        terminal.send("\033[A\033[A\r")
        terminal.until("You said")
    assert gateway.sent[0] == gateway.sent[2] == ["first line\nsecond line"]
    file = tmp_path / "tandem" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == "first line\\\nsecond line\nthe other\nfirst line\\\nsecond line\n"


def test_pasted_lines_are_one_message(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        assert b"\033[?2004h" in terminal.raw, "the terminal is asked to mark what is pasted"
        terminal.send("\033[200~one\ntwo\n\033[201~\r")
        terminal.until("You said")
    assert gateway.sent == [["one\ntwo"]]


def test_tab_completes_commands_and_models(gateway: TalkingStub, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.send("/mo\t@tandem/o\t\r")
        terminal.until("@tandem/other answers")


def test_from_a_pipe_each_line_is_a_message_and_only_answers_are_printed(gateway: TalkingStub) -> None:
    result = piped(gateway, "Hi\n\nWhat is \\\n2 + 3?\n//etc\n/model\n/reset\nBye")
    assert (result.exit_code, result.stderr) == (0, "the conversation is empty\n")
    assert result.stdout == (
        "(1) You said Hi\n(3) You said What is \n2 + 3?\n(5) You said /etc\n"
        "* @tandem/demo\n  @tandem/other\n(1) You said Bye\n"
    )


def test_a_script_whose_question_failed_ends_with_1_after_the_others(gateway: TalkingStub) -> None:
    result = piped(gateway, "too much\nHi\n/nonsense\n/quit\nnever asked\n")
    assert (result.exit_code, result.stdout) == (1, "(1) You said Hi\n")
    assert result.stderr == (
        "tandem: 3040: Capacity temporarily exceeded; /retry asks again; the server asks to wait 7 s\n"
        "tandem: there is no command /nonsense; /help lists them, and //nonsense sends it as a message\n"
    )
    assert gateway.sent == [["too much"], ["Hi"]]


def test_bytes_that_are_no_text_are_still_asked(gateway: TalkingStub) -> None:
    command = [sys.executable, "-m", "tandem_client.cli", "chat", "--url", gateway.url]
    assert subprocess.run(command, input=b"caf\xe9\n", check=True, capture_output=True).stdout
    assert gateway.sent == [["caf\N{REPLACEMENT CHARACTER}"]]


def test_ctrl_c_ends_a_script(gateway: TalkingStub) -> None:
    begin = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "tandem_client.cli", "chat", "--url", gateway.url]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", begin, *command], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"go on for ever\nHi\n")
        process.stdin.flush()
        assert process.stdout.read(4) == b"(1) "
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert gateway.client_left.wait(20)
        assert process.stderr.read() == b""
    assert gateway.sent == [["go on for ever"]]


def test_nobody_there_and_an_unknown_model_are_said_at_once(gateway: TalkingStub) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        result = CliRunner().invoke(app, ["chat", "--url", url], input="Hi\n")
    assert (result.exit_code, result.stderr) == (1, f"tandem: no Tandem at {url}; start one with `tandem up`\n")
    result = piped(gateway, "Hi\n", "--model", "gpt")
    assert result.exit_code == 1
    assert result.stderr == "tandem: no model gpt is served here; there is @tandem/demo, @tandem/other\n"


def test_a_saved_conversation_can_be_sent_as_it_is(gateway: TalkingStub, tmp_path: Path) -> None:
    file, other = tmp_path / "chat.json", tmp_path / "other.json"
    other.write_text("precious")
    result = piped(
        gateway, f"/system Be brief.\nHi\n/save {file}\n/save {file}\n/save {other}\n/save /no/where\n/save\n"
    )
    assert json.loads(file.read_text()) == {
        "model": "@tandem/demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "(2) You said Hi"},
        ],
        "stopped_answers": [],
    }
    assert other.read_text() == "precious"
    errors = result.stderr.splitlines()[-3:]
    assert errors[0].endswith("other.json exists already; name a new file")
    assert errors[1] == "tandem: cannot write /no/where: No such file or directory"
    assert errors[2] == "tandem: /save needs the name of a file: /save chat.json"


def test_the_system_message_is_shown_set_and_removed(gateway: TalkingStub) -> None:
    result = piped(gateway, "/system\n/system Be brief.\n/system\none\n/system -\ntwo\n/retry\n")
    assert result.stdout.splitlines()[:2] == ["no system message; /system TEXT sets one", "Be brief."]
    assert [messages[0] for messages in gateway.sent] == ["Be brief.", "one", "one"]


def test_stopped_answers_are_known_by_their_place() -> None:
    conversation = Conversation("s", [Turn("a", "b"), Turn("c", "d", stopped=True)])
    document = conversation.document("m")
    assert document["stopped_answers"] == [4]
    assert isinstance(document["messages"], list) and document["messages"][4]["content"] == "d"


def test_a_model_has_no_power_over_the_terminal(gateway: TalkingStub, tmp_path: Path) -> None:
    assert visible("\033]0;title\a[red]x\x9b2J\r\n\ty\x7f") == "␛]0;title␇[red]x�2J\n\ty␡"
    result = piped(gateway, "\033[2J [bold]\n")
    assert result.stdout == "(1) You said ␛[2J [bold]\n"
    with chatting(gateway, tmp_path) as terminal:
        assert terminal.say("[bold]x").startswith("(1) You said [bold]x")


def test_half_a_surrogate_pair_is_never_sent_back() -> None:
    assert Answer().add("\ud83d") == "?"


def test_an_answer_without_usage_or_pieces_has_no_pace() -> None:
    assert Answer().facts(None, None) == ""


def test_history_is_bounded_and_a_folder_that_takes_none_is_said_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    history = History(tmp_path / "tandem" / "chat_history", warnings.append)
    assert history.load() == []
    for number in range(MAX_MESSAGES + 2):
        history.append(str(number))
    assert history.load()[0] == "2" and len(history.load()) == MAX_MESSAGES
    assert (tmp_path / "tandem" / "chat_history").read_text().startswith("2\n")
    refused = History(tmp_path / "tandem" / "chat_history" / "below", warnings.append)
    assert refused.load() == []
    refused.append("x")
    assert len(warnings) == 1 and "not kept for later chats" in warnings[0]
