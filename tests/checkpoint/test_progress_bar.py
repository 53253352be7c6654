from contextlib import nullcontext

from dtckpt.checkpoint.progress_bar import LINE_S, ProgressLines, open_progress


def test_a_line_once_in_a_while_with_speed_and_time_left():
    now, lines = [100.0], []
    with nullcontext(ProgressLines("comparing", 8 << 20, lambda: now[0], lines.append)) as progress:
        for _ in range(6):
            now[0] += LINE_S / 2
            progress.advance("w", 1 << 20)
    assert lines == [
        "dtckpt: comparing: 2.0 MiB of 8.0 MiB, 204.8 KiB/s, 30 s left",
        "dtckpt: comparing: 4.0 MiB of 8.0 MiB, 204.8 KiB/s, 20 s left",
        "dtckpt: comparing: 6.0 MiB of 8.0 MiB, 204.8 KiB/s, 10 s left",
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
