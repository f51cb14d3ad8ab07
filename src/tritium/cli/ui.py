"""`tritium ui`: a page over run directories (driver)."""

from __future__ import annotations

import contextlib

import click

from tritium.gang.driver.told import told
from tritium.observe.run_directory import runs_folder
from tritium.ui.server import page


@click.command()
@click.argument("run_dirs", metavar="[RUN_DIR]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0: one that is free.")
@click.option("--allow", multiple=True, metavar="NAME", help="A name by which browsers may call it: that of a proxy.")
def ui(run_dirs: tuple[str, ...], host: str, port: int, allow: tuple[str, ...]) -> None:
    """Show runs on a page in the browser, while they go on and afterwards.

    RUN_DIR is a run directory, or a folder of them: a path, or any URL that fsspec supports. Without one it is the
    folder of new runs, $TRITIUM_RUNS or tritium-runs here. Who has the address that is printed can read the runs, and
    change nothing. Ctrl-C ends it.
    """
    served = page(run_dirs or (runs_folder(),), told, host, port, allow)
    click.echo(f"{served.url}\nCtrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        served.serve()
