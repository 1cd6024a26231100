"""`paperlm watch`: a line for each job that is being made, with its progress and time left, until none is."""

from __future__ import annotations

import fcntl
import re
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from paperlm.plan.project import Project

BAR = re.compile(r"(\d+)%\|.*?\| *([\d,.]+\w?)/([\d,.]+\w?) \[([\d:]+)<([\d:?]+)")
"What tqdm prints: share, done, of how many, since when, how long still."


def running(folder: Path) -> list[str]:
    """Names of the jobs whose lock a process holds."""
    found = []
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name)
    return found


def progress(log: Path) -> tuple[str, str]:
    """(share done, time left) by the last progress bar of a log; empty where there is none yet."""
    if not log.is_file():
        return "", ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        text = file.read().decode(errors="replace")
    bars = BAR.findall(text)
    return (f"{bars[-1][0]} %", bars[-1][4]) if bars else ("", "")


def table(project: Project) -> Table:
    """The jobs that are being made at the project's scale."""
    grid = Table(title=f"being made at scale {project.scale.scale}", title_justify="left")
    for column in ("job", "done", "left"):
        grid.add_column(column, justify="left" if column == "job" else "right")
    for job_id in running(project.root / f"results/{project.scale.scale}/locks"):
        logs = sorted((project.root / f"logs/{project.scale.scale}").glob(f"*/{job_id}.log"))
        grid.add_row(job_id, *(progress(logs[0]) if logs else ("", "")))
    return grid


def watch(project: Project, seconds: float, once: bool) -> None:
    """Show the table, anew every so many seconds, until no job is being made for a minute (or once)."""
    console = Console()
    if once or not console.is_terminal:
        grid = table(project)
        console.print(grid if grid.row_count else f"no job is being made at scale {project.scale.scale}")
        return
    quiet = time.monotonic()
    with Live(table(project), console=console, auto_refresh=False) as live:
        while time.monotonic() - quiet < 60:
            grid = table(project)
            if grid.row_count:
                quiet = time.monotonic()
            live.update(grid, refresh=True)
            time.sleep(seconds)
