"""The server of the live page over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import cbdsl
from cbdsl.watch import page_server
from cbdsl.watch.page_server import PageServer, is_loopback, start
from support.deployment import wait_until
from support.helpers import blobs, perceptron, small_spec
from support.http_requests import Stream, ask, page, raw
from support.refusals import refused_as
from support.run_folders import append, lie, line, spec_of, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "outside.txt").write_text("root:secret")
    return write_run(tmp_path / "run", [line(1), lie(2, 4)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """One server for all tests that change neither it nor its folder."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "outside.txt").write_text("root:secret")
    with page(write_run(folder / "run", [line(1), lie(2, 4)])) as found:
        yield found


def test_the_page_and_its_files_load_nothing_from_elsewhere(server: PageServer) -> None:
    for path in ("/", "/page.js", "/charts.js", "/workers.js", "/page.css", "/watch.css"):
        status, headers, text = ask(server, path)
        assert status == 200
        assert not [
            word for word in ("https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(") if word in text
        ]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert not [name for name in headers if name.startswith("access-control")]
        assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/spec.toml", "/rounds.jsonl", "/.lock", "/../outside.txt", "/%2e%2e/outside.txt", "/..%2foutside.txt",
        "/....//outside.txt", "//etc/passwd", "/page.js/../../run.py", "/runs/../page.js", "/runs/%2e%2e/", "/runs//",
        "/runs/x/../../outside.txt", "/run.py", "/page.html", "/%00", "/runs/..%00/", "/round", "/round?number=-1",
        "/round?number=99999999999999999999", "/round?number=²", "/events/", "http://127.0.0.1/spec.toml", "*",
    ],
)  # fmt: skip
def test_no_other_address_leads_anywhere(path: str, server: PageServer) -> None:
    answer = raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ")[1] in {b"404", b"400"}
    assert b"root" not in answer
    assert b"preset" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"])
def test_nothing_can_be_changed(method: str, server: PageServer) -> None:
    answer = raw(server, f"{method} / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert b" 405 " in answer.splitlines()[0]
    [allowed] = [one.partition(b": ")[2] for one in answer.splitlines() if one.lower().startswith(b"allow: ")]
    assert set(allowed.split(b", ")) == {b"GET", b"HEAD"}


@pytest.mark.parametrize("path", ["/", "/metrics", "/events"])
def test_headers_alone_can_be_asked_for(path: str, server: PageServer) -> None:
    assert ask(server, path, "HEAD")[::2] == (200, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "0.0.0.0", "192.168.1.7"]
)
def test_a_foreign_name_for_this_machine_is_refused(host: str, server: PageServer) -> None:
    for path in ("/", "/metrics", "/events"):
        assert ask(server, path, Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:8750"])
def test_the_names_of_the_loopback_are_taken_at_any_port(host: str, server: PageServer) -> None:
    assert ask(server, "/metrics", Host=host)[0] == 200


def test_a_page_of_another_site_is_refused(server: PageServer) -> None:
    own = f"127.0.0.1:{server.port}"
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://localhost", f"http://{own}.example"):
        assert ask(server, "/events", Host=own, Origin=origin)[0] == 403
    assert ask(server, "/metrics", Host=own, Origin=f"http://{own}")[0] == 200
    assert ask(server, "/events", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="empty")[0] == 403
    assert ask(server, "/metrics", Sec_Fetch_Site="same-site", Sec_Fetch_Dest="image")[0] == 403
    assert ask(server, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Dest="document")[0] == 200


def test_beyond_the_loopback_a_token_is_needed(run: Path) -> None:
    with page(run, "0.0.0.0") as server:
        token = server.token
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
            asked = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            assert raw(server, asked.encode()).split(b" ")[1] in {b"404", b"400"}
        assert ask(server, f"/{token}/")[0] == 200
        assert (
            "cbdsl_round 2" in ask(server, f"/{token}/metrics", Host="192.168.1.7:80")[2]
        )  # a number cannot be rebound
        assert ask(server, f"/{token}/metrics", Host=socket.gethostname())[0] == 200
        assert ask(server, f"/{token}/metrics", Host="evil.example")[0] == 403
        assert ask(server, "/health")[::2] == (200, "ok\n")  # for monitors, without the token
    with page(run, "0.0.0.0") as other:
        assert other.token != token
    with start(run, "0.0.0.0", 0, token="a-token-that-stays") as again:
        assert again.url.endswith("/a-token-that-stays/")
    with refused_as("invalid-name", "at least 16"):
        start(run, "0.0.0.0", 0, token="short")


def test_what_is_the_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "localhost.evil.example", "")))


def test_connections_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_MOST_CONNECTIONS", 3)
    with page(run) as server:
        streams = [Stream(server) for _ in range(2)]
        assert [stream.answer.status for stream in streams] == [200] * 2
        assert ask(server, "/")[0] == 503
        streams[0].close()
        wait_until(lambda: ask(server, "/")[0] == 200)
        streams[1].close()


def test_a_server_ends_while_pages_are_open(run: Path) -> None:
    with page(run) as server:
        stream = Stream(server)
        assert stream.next()["facts"]["round"] == 2
    assert stream.answer.read() == b"\n"  # the end of the message, and of the stream
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), 5)
    stream.close()


def test_a_round_can_be_replayed(run: Path) -> None:
    with page(run) as server:
        status, _, text = ask(server, "/round?number=1")
        assert (status, json.loads(text)["banned"]) == (200, 0)
        assert json.loads(ask(server, "/round?number=2")[2])["banned"] == 1
        assert ask(server, "/round?number=3")[0] == 404


def test_a_run_is_shown_round_by_round_while_it_runs(tmp_path: Path) -> None:
    spec, shown = small_spec(rounds=4, attack__byzantine=1), threading.Semaphore(0)

    class Wait(cbdsl.Callback):
        """Goes on when the page has received the round before."""

        def round(self, record: cbdsl.RoundRecord) -> None:
            assert record.round == spec.rounds or shown.acquire(timeout=60)

    def play() -> None:
        cbdsl.run(spec, model=perceptron, data=blobs(), out=tmp_path / "run", callbacks=[Wait()])

    with page(tmp_path / "run") as server:  # it is not there yet
        stream = Stream(server)
        assert stream.next()["facts"]["status"] == "waiting"
        player = threading.Thread(target=play)
        player.start()
        received = []
        for number in range(1, spec.rounds + 1):
            received += stream.until(number)
            shown.release()
        player.join()
        stream.close()
    points = [point[0] for news in received for point in news["points"]]
    assert sorted(set(points)) == list(range(1, spec.rounds + 1))
    assert any(news["facts"]["status"] == "running" for news in received)


def test_an_open_page_receives_a_rewritten_run(run: Path) -> None:
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
            "/round",
        ):
            assert ask(server, path)[0] == 404


def test_a_port_that_is_taken_is_an_error_only_if_it_was_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with page(run) as server:
        port = server.port
        with refused_as("connection-failed", f"port {port}"):
            start(run, port=port)
        monkeypatch.setattr(page_server, "USUAL_PORT", port)
        with start(run) as other:
            assert other.port != port
    with refused_as("connection-failed", "no.such.host.invalid"):
        start(run, "no.such.host.invalid", 0)
