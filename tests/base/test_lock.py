"""Locks between processes of one machine and of several."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lingua.base import lock
from lingua.base.errors import UserError
from lingua.base.lock import claimed, exclusive, holder, is_free
from tests.disk import full_disk
from tests.locks import ELSEWHERE, hold_lock, lose
from tests.mistakes import refused

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a lock, where locks live shortly."""
    monkeypatch.setattr(lock, "LIFETIME_S", 0.4)
    return tmp_path / "a.lock"


def take(path: Path, lines: list[str] | None = None, patient: bool = False) -> float:
    """Seconds until the lock was held."""
    begin = time.monotonic()
    with exclusive(path, [].append if lines is None else lines.append, patient):
        assert holder(path).startswith(f"process {os.getpid()} on ") and not is_free(path)
    assert not path.exists() and holder(path) is None
    return time.monotonic() - begin


def test_a_process_keeps_its_lock_while_it_lives_also_when_it_is_stopped(path):
    with hold_lock(path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.utime(path, (0, 0))
        time.sleep(0.5)  # longer than a lock's life
        begin = time.monotonic()
        with pytest.raises(UserError, match=rf"{path} is held by process {process.pid} on .*runs?"):
            take(path)
        assert time.monotonic() - begin < 0.3 and not is_free(path)
        process.kill()
        process.wait()
        assert take(path) < 0.3


def test_a_dead_process_whose_number_is_used_again_holds_nothing(path):
    with claimed(path):
        mine = path.read_text()
    place, _, started = mine.split(", ")[1].partition(" ")
    path.write_text(mine.replace(started, str(int(started) - 1)))
    assert is_free(path) and not path.exists()
    path.write_text(mine)
    assert not is_free(path)
    path.write_text(mine.replace(place, f"{place}0"))  # of another machine: it may live
    assert not is_free(path) and path.exists()


@pytest.mark.parametrize("offset_s", [-600, 600])
def test_clocks_of_machines_may_differ(path, offset_s):
    """What counts is that the date changes, whatever it is."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.1):
            os.utime(path, (time.time() + offset_s,) * 2)

    path.write_text(ELSEWHERE)
    os.utime(path, (time.time() + offset_s,) * 2)
    thread = threading.Thread(target=renew)
    thread.start()
    lines: list[str] = []
    refused(lambda: take(path, lines), "held by process 5 on node-2, which is running")
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        assert not is_free(path)
        time.sleep(0.05)
    done.set()
    thread.join()
    os.utime(path, (0, 0))  # a change that is first seen from here on
    assert 0.4 <= take(path, lines, patient=True) < 2
    assert len(lines) == 2 and all(f"{path} is held by process 5 on node-2" in s for s in lines)


@pytest.mark.parametrize("content", [b"", b"\0\xff" * 5000, b"vm|17|x.lock\n", None])
def test_a_file_that_is_no_lock_is_waited_for_and_taken_over(path, content):
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    lines: list[str] = []
    assert 0.4 <= take(path, lines) < 2
    [line] = lines
    assert line.startswith(f"{path} is held by an unknown process: waiting up to ")


def test_a_lost_lock_is_an_error_that_names_who_has_it_and_is_left_to_them(path):
    with claimed(path) as held:
        held.check()
        assert held.is_held() and not held.lost
        lose(path)
        time.sleep(0.3)  # the thread that renews it finds out
        assert held.lost
        with pytest.raises(UserError, match=f"{path} is held by process 5 on node-2 now: it was r"):
            held.check()
    assert path.read_text() == ELSEWHERE


def test_a_lock_that_somebody_removes_is_created_again_by_its_holder(path, caplog):
    with claimed(path) as held:
        content = path.read_text()
        time.sleep(0.1)
        for n in range(1, 4):
            held.check()
            path.unlink()
            with ThreadPoolExecutor(8) as threads:  # of which one creates it
                assert all(threads.map(lambda _: held.is_held(), range(8)))
            held.check()
            assert path.read_text() == content and len(caplog.messages) == n
            assert not is_free(path)
    assert not path.exists()
    assert f"{path} was removed: its process, {os.getpid()}, goes on" in caplog.text


def test_a_lock_that_is_gone_before_it_has_lasted_is_lost(path, monkeypatch):
    """Of many that find a dead lock, one more may have had it meanwhile, and released it."""
    monkeypatch.setattr(lock, "LIFETIME_S", 60.0)
    with claimed(path) as held:
        assert held.is_held()
        path.unlink()
        assert not held.is_held() and not path.exists()


def test_a_lock_that_is_gone_after_its_machine_was_suspended_is_lost(path, monkeypatch):
    """Its monotonic clock stood still, while another machine may have had the lock."""
    with claimed(path) as held:
        time.sleep(0.1)
        assert held.is_held()
        path.unlink()
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        assert not held.is_held() and not path.exists()


@pytest.mark.parametrize("how", ["out of reach", "without its folder"])
def test_a_lock_that_another_could_have_had_is_not_created_again(path, how):
    path = path.parent / "folder" / "a.lock"
    path.parent.mkdir()
    with claimed(path) as held:
        os.rename(path.parent, away := path.parent.with_name("away"))
        if how == "out of reach":
            os.symlink("/proc/self/mem", path.parent)  # which is no folder
            time.sleep(0.3)
            assert held.is_held()  # it may be renewed in time
            path.parent.unlink()
            (away / "a.lock").unlink()
            away.rename(path.parent)
        error = f"{path} is gone: it was removed or .* the same command continues once it is free"
        with pytest.raises(UserError, match=error):
            held.check()
        assert held.lost and not path.exists()


def test_of_many_that_find_a_dead_lock_one_gets_it(path):
    everyone = threading.Barrier(8)
    for _ in range(20):
        path.write_text(ELSEWHERE)
        with claimed(path) as held:
            assert held is None
        lock._sightings[path] = lock._sightings[path][0], -100.0  # seen long ago

        def attempt(_: int) -> bool:
            everyone.wait()
            with claimed(path) as held:
                everyone.wait()
                return held is not None and held.is_held()

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(attempt, range(8))) == 1
        assert os.listdir(path.parent) == []


def test_a_full_disk_leaves_no_lock(path):
    with full_disk(10), pytest.raises(OSError, match="File too large"), claimed(path):
        pass
    assert not path.exists()
