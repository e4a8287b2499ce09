"""The page's server over real sockets: fixed addresses, readers only, no other site's pages, and never too many."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

import cbdsl
from cbdsl.errors import UserError
from cbdsl.watch import http as server_module
from cbdsl.watch.http import AccessControl, is_loopback, start
from support.helpers import blobs, perceptron, small_spec
from support.http_requests import Stream, ask, page, raw
from support.run_folders import append, lie, line, spec_of, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "outside.txt").write_text("root:secret")
    return write_run(tmp_path / "run", [line(1), lie(2, 4)])


def test_the_page_and_what_belongs_to_it_fetch_nothing_from_elsewhere(run: Path) -> None:
    with page(run) as server:
        for path in ("/", "/page.js", "/charts.js", "/workers.js", "/page.css"):
            status, headers, text = ask(server, path)
            assert status == 200
            assert not [
                word for word in ("https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(") if word in text
            ]
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert not [name for name in headers if name.lower().startswith("access-control")]
            assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        "/spec.toml", "/rounds.jsonl", "/.lock", "/../outside.txt", "/%2e%2e/outside.txt", "/..%2foutside.txt",
        "/....//outside.txt", "//etc/passwd", "/page.js/../../run.py", "/runs/../page.js", "/runs/%2e%2e/", "/runs//",
        "/runs/x/../../outside.txt", "/run.py", "/page.html", "/%00", "/runs/..%00/", "/round", "/round?number=-1",
        "/round?number=99999999999999999999", "/round?number=²", "/events/", "http://127.0.0.1/spec.toml", "*",
    ],
)  # fmt: skip
def test_no_other_address_leads_anywhere(path: str, run: Path) -> None:
    with page(run) as server:
        answer = raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    assert answer.split(b" ")[1] in {b"404", b"400"}
    assert b"root" not in answer
    assert b"preset" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"])
def test_nothing_can_be_changed(method: str, run: Path) -> None:
    with page(run) as server:
        answer = raw(server, f"{method} / HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 405 " in answer.splitlines()[0]
        assert b"Allow: GET, HEAD" in answer
        status, _, text = ask(server, "/metrics", "HEAD")
        assert (status, text) == (200, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "0.0.0.0", "192.168.1.7"]
)
def test_a_foreign_name_for_this_machine_is_refused(host: str, run: Path) -> None:
    with page(run) as server:
        for path in ("/", "/metrics", "/events"):
            assert ask(server, path, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:8750"])
def test_the_names_of_the_loopback_are_taken_at_any_port(host: str, run: Path) -> None:
    with page(run) as server:
        assert ask(server, "/metrics", Host=host)[0] == 200


@pytest.mark.parametrize("spelling", ["Origin", "origin", "ORIGIN"])
def test_a_page_of_another_site_is_refused(spelling: str, run: Path) -> None:
    with page(run) as server:
        own = f"127.0.0.1:{server.server_address[1]}"
        for origin in (
            "http://evil.example",
            "null",
            "http://127.0.0.1:1",
            "https://localhost",
            f"http://{own}.evil.example",
        ):
            assert ask(server, "/events", Host=own, **{spelling: origin})[0] == 403
        assert ask(server, "/metrics", Host=own, **{spelling: f"http://{own}"})[0] == 200
        assert ask(server, "/events", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="empty")[0] == 403
        assert ask(server, "/metrics", Sec_Fetch_Site="same-site", Sec_Fetch_Dest="image")[0] == 403
        assert ask(server, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="document")[0] == 200


def test_beyond_the_loopback_a_token_is_needed(run: Path) -> None:
    with page(run, "0.0.0.0") as server:
        token = server.guard.token
        assert len(token) >= 24
        assert server.url.endswith(f"/{token}/")
        for path in (
            "/",
            "/metrics",
            "/events",
            f"/{token[:-1]}/",
            f"/{token}x/metrics",
            f"/{token.upper()}/",
            "//",
            "/é/",
        ):
            assert raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()).split(b" ")[1] == b"404"
        assert ask(server, f"/{token}/")[0] == 200
        assert "cbdsl_round 2" in ask(server, f"/{token}/metrics", Host="192.168.1.7:80")[2]  # an address is no trick
        assert ask(server, f"/{token}/metrics", Host=socket.gethostname())[0] == 200
        assert ask(server, f"/{token}/metrics", Host="evil.example")[0] == 403
        assert AccessControl.of("0.0.0.0").token != token


def test_what_is_the_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "localhost.evil.example", "")))


def test_streams_are_bounded_and_given_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_STREAMS", 3)
    monkeypatch.setattr(server_module, "_BREATH", 0.1)
    with page(run) as server:
        streams = [Stream(server) for _ in range(3)]
        assert [stream.answer.status for stream in streams] == [200] * 3
        assert ask(server, "/events")[0] == 503
        assert ask(server, "/")[0] == 200
        streams[0].close()
        deadline = time.monotonic() + 30
        while (again := Stream(server)).answer.status != 200:  # noticed when the next breath cannot be written
            again.close()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for stream in (*streams[1:], again):
            stream.close()


def test_a_client_that_says_nothing_is_hung_up_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.3)
    with page(run) as server, socket.create_connection(("127.0.0.1", server.server_address[1]), 20) as silent:
        silent.sendall(b"GET / HT")
        assert silent.recv(100) == b""


def test_connections_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_REQUESTS", 2)
    with page(run) as server:
        address = ("127.0.0.1", server.server_address[1])
        held = [socket.create_connection(address, 20) for _ in range(3)]
        assert held[2].recv(100) == b""  # one too many
        for one in held:
            one.close()
        deadline = time.monotonic() + 30
        while True:
            try:
                assert ask(server, "/")[0] == 200
                break
            except (OSError, ConnectionError):
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_round_can_be_replayed(run: Path) -> None:
    with page(run) as server:
        status, _, text = ask(server, "/round?number=1")
        assert (status, json.loads(text)["banned"]) == (200, 0)
        assert json.loads(ask(server, "/round?number=2")[2])["banned"] == 1
        assert ask(server, "/round?number=3")[0] == 404


def test_a_real_run_is_told_of_while_it_is_played(tmp_path: Path) -> None:
    spec = small_spec(rounds=12, attack__byzantine=1)

    def play() -> None:
        cbdsl.run(spec, model=perceptron, data=blobs(), out=tmp_path / "run", callbacks=[Slowly()])

    with page(tmp_path / "run") as server:  # it is not there yet
        stream = Stream(server)
        assert stream.next()["facts"]["status"] == "waiting"
        player = threading.Thread(target=play)
        player.start()
        heard = stream.until(12)
        player.join()
        stream.close()
    points = [point[0] for news in heard for point in news["points"]]
    assert sorted(set(points)) == list(range(1, 13))
    assert len([news for news in heard if news["points"]]) > 1  # round by round, and not all at the end
    assert any(news["facts"]["status"] == "running" for news in heard)


class Slowly(cbdsl.Callback):
    def round(self, record: cbdsl.RoundRecord) -> None:  # noqa: ARG002
        time.sleep(0.15)


def test_a_page_that_is_open_hears_of_a_rewritten_run(run: Path) -> None:
    with page(run) as server:
        stream = Stream(server)
        assert stream.next()["facts"]["round"] == 2
        write_run(run.parent / "anew", [line(1)])
        (run.parent / "anew" / "rounds.jsonl").replace(run / "rounds.jsonl")
        news = stream.next()
        while news["facts"]["round"] != 1:
            news = stream.next()
        assert news["whole"]
        append(run / "rounds.jsonl", line(2), line(3))
        assert stream.until(3)[-1]["facts"]["banned"] == 0
        stream.close()


def test_each_run_of_a_sweep_has_its_page(tmp_path: Path) -> None:
    for number in range(2):
        lines = [line(one) for one in range(1, 3 + number)]
        write_run(tmp_path / "runs" / f"run{number}", lines, spec_of(workers=4, rounds=9, seed=number))
    with page(tmp_path) as server:
        stream = Stream(server)
        assert [one["name"] for one in stream.next()["runs"]] == ["run0", "run1"]
        stream.close()
        assert ask(server, "/runs/run1/")[0] == 200
        assert "cbdsl_round 3" in ask(server, "/runs/run1/metrics")[2]
        assert json.loads(ask(server, "/runs/run1/round?number=2")[2])["round"] == 2
        stream = Stream(server, "/runs/run1/events")
        assert stream.next()["facts"]["round"] == 3
        stream.close()
        for path in (
            "/runs/run2/",
            "/runs/run1",
            "/runs/run1/spec.toml",
            "/runs/../runs/run1/",
            "/runs/run%31/",
            "/round",
        ):
            assert ask(server, path)[0] == 404


def test_a_port_that_is_taken_is_an_error_only_if_it_was_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with page(run) as server:
        port = int(server.server_address[1])
        with pytest.raises(UserError, match=f"port {port}: .* Give another --port"):
            start(run, port=port)
        monkeypatch.setattr(server_module, "USUAL_PORT", port)
        other = start(run)
        assert other.server_address[1] != port
        other.server_close()
    with pytest.raises(UserError, match=r"Nothing can listen at no\.such.host.invalid"):
        start(run, "no.such.host.invalid", 0)
