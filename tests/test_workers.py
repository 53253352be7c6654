"""The tests' own machinery: workers that are forked from one collection, batches, and the shares of sweeps."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import shares, tests_of
from support.batches import SIZE, Dealer, neighbours
from support.forked_workers import num_workers
from support.shares import share, todays

CONFTEST = """
import pytest
from support.forked_workers import ForkedWorkers

def pytest_configure(config):
    config.addinivalue_line("markers", "processes: x")
    config.addinivalue_line("markers", "together(name): x")
    config.pluginmanager.register(ForkedWorkers(3), "forked-workers")

@pytest.fixture(scope="session")
def of_session():
    yield
    with open("ended", "a") as file:
        file.write("e")
"""
CASES = """
import os, warnings, pytest
print("collected in", os.getpid())

@pytest.mark.parametrize("number", range(40))
def test_passes(of_session, tmp_path, number):
    (tmp_path / "x").touch()

def test_fails(of_session):
    print("what it printed")
    assert 1 + 1 == 3

@pytest.mark.skip(reason="the reason")
def test_skipped(): ...

def test_error(no_such_fixture): ...
"""
DIES = """
import os
def test_before(): ...
def test_dies(): os._exit(7)
def test_after(): ...
"""


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(text)
    support = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": support, "PYTEST_DEBUG_TEMPROOT": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_reports_are_those_of_one_process(tmp_path):
    result = run(tmp_path, "--junitxml=report.xml", test_cases=CASES)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed, 40 passed, 1 skipped, 1 error" in result.stdout
    assert "assert (1 + 1) == 3" in result.stdout
    assert "what it printed" in result.stdout
    assert "the reason" in result.stdout
    assert "fixture 'no_such_fixture' not found" in result.stdout
    assert len(ElementTree.parse(tmp_path / "report.xml").findall(".//testcase")) == 43
    assert 1 <= len((tmp_path / "ended").read_text()) <= 3, "each worker tears the session's fixtures down, once"


def test_a_worker_that_dies_fails_the_test_that_it_ran_and_no_other(tmp_path):
    result = run(tmp_path, test_cases=CASES, test_dies=DIES)
    assert "worker 1 died with exit code 7" in result.stdout or "died with exit code 7 while it ran" in result.stdout
    assert "2 failed, 42 passed, 1 skipped, 1 error" in result.stdout


def test_no_more_tests_start_after_the_first_failure_where_that_is_asked_for(tmp_path):
    many = "import pytest\n@pytest.mark.parametrize('n', range(400))\ndef test_it(n): assert n < 0\n"
    result = run(tmp_path, "-x", test_many=many)
    assert result.returncode == 1
    assert result.stdout.count("FAILED") < 100
    assert "stopping after" in result.stdout


def test_an_error_in_the_collection_runs_nothing(tmp_path):
    result = run(tmp_path, test_cases=CASES, test_broken="import no_such_module")
    assert result.returncode == 2
    assert "1 error" in result.stdout
    assert "passed" not in result.stdout


def test_batches_are_neighbours_of_one_group():
    files = ["a"] * (SIZE + 1) + ["b"] * 2 + [("together",)] * (3 * SIZE)
    batches = neighbours(range(len(files)), files.__getitem__)
    assert [len(batch) for batch in batches] == [SIZE, 1, 2, 3 * SIZE]
    assert [test for batch in batches for test in batch] == list(range(len(files)))


def test_few_workers_have_client_processes_at_one_time():
    dealer = Dealer([(number,) for number in range(5)], [(number,) for number in range(5, 8)], most_with_clients=3)
    took = [dealer.take(worker) for worker in range(4)]
    assert took == [(0,), (1,), (2,), (5,)]
    dealer.give_back(1, ())
    assert dealer.take(3) == (3,)
    assert [dealer.take(3), dealer.take(4), dealer.take(5)] == [(4,), (6,), (7,)]
    assert dealer.is_empty
    assert dealer.take(0) is None


def test_the_rest_of_a_batch_is_given_to_another_worker():
    dealer = Dealer([(0, 1, 2)], [], most_with_clients=1)
    assert dealer.take(0) == (0, 1, 2)
    dealer.give_back(0, (2,))
    assert not dealer.is_empty
    assert dealer.take(1) == (2,)


@pytest.mark.parametrize(
    ("text", "cores", "without_clients", "count"),
    [("0", 2, False, 0), ("3", 2, False, 3), ("auto", 2, False, 6), ("auto", 2, True, 3), ("auto", 64, False, 12)],
)
def test_number_of_workers(text, cores, without_clients, count):
    assert num_workers(text, cores, without_clients=without_clients) == count


# --- shares ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def some(monkeypatch):
    """A run that tries shares."""
    monkeypatch.setattr(shares, "IS_ALL", False)


def test_every_case_has_its_day(some):
    cases = list(range(10))
    days = [share(cases, 4, "key", seed) for seed in range(30, 33)]
    assert all(len(day) == 4 for day in days)
    assert {case for day in days for case in day} == set(cases)


class FakeTest:
    def __init__(self, nodeid: str, *args: int, **kwargs: str) -> None:
        self.nodeid = nodeid
        self._marker = pytest.mark.share(*args, **kwargs).mark if args else None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marker


def test_functions_with_one_name_are_one_sweep(some):
    always = [FakeTest("a"), FakeTest("b")]
    alone = [FakeTest(f"c[{number}]", 2) for number in range(5)]
    together = [FakeTest(f"{name}[{number}]", 3, of="jobs") for name in "de" for number in range(4)]
    chosen = todays([*always, *alone, *together])
    assert set(always) <= chosen
    assert [len(chosen & set(cases)) for cases in (alone, together)] == [2, 3]


def test_the_hook_runs_the_fast_tests_of_make():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    assert f'-m pytest {" ".join(tests_of.OPTIONS[:2])} "{tests_of.OPTIONS[2]}"' in makefile
    assert list(tests_of.tests_of(["dtckpt/layout/mesh.py", "server/dtckpt_server/rules.py", "README.md"])) == [
        "tests/layout/test_mesh.py",
        "tests/server",
    ]
