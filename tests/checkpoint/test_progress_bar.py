from contextlib import nullcontext

from dtckpt.checkpoint.progress_bar import FIRST_LINE_S, LINE_S, ProgressLines, open_progress


def test_a_line_once_in_a_while_with_speed_and_time_left():
    now, lines = [100.0], []
    with nullcontext(ProgressLines("comparing", 8 << 20, lambda: now[0], lines.append)) as progress:
        for seconds in (FIRST_LINE_S / 2, FIRST_LINE_S, LINE_S / 2, LINE_S, LINE_S / 2, LINE_S / 2):
            now[0] += seconds
            progress.advance("w", 1 << 20)
    assert lines == [
        "dtckpt: comparing: 2.0 MiB of 8.0 MiB, 1.3 MiB/s, 4 s left",
        "dtckpt: comparing: 4.0 MiB of 8.0 MiB, 248.2 KiB/s, 16 s left",
        "dtckpt: comparing: 6.0 MiB of 8.0 MiB, 231.8 KiB/s, 9 s left",
    ]


def test_work_without_bytes():
    now, lines = [0.0], []
    with nullcontext(ProgressLines("reading", 0, lambda: now[0], lines.append)) as progress:
        progress.advance("w", 0)
        now[0] = 2 * LINE_S
        progress.advance("w", 0)
    assert lines == ["dtckpt: reading: 0 B of 0 B, 0 B/s"]


def test_lines_in_a_pipe(capsys):
    with open_progress("reading", 1) as progress:
        assert isinstance(progress, ProgressLines)
        progress.advance("w", 1)
    assert capsys.readouterr() == ("", "")
