"""`tritium clean`: remove directories of earlier runs, after asking (driver)."""

from __future__ import annotations

import click

from tritium.observe import runs


@click.command()
@click.argument("place", metavar="[RUNS]", required=False)
@click.option("--keep", type=click.IntRange(min=0), help="Keep the newest N runs.", metavar="N")
@click.option("--older", type=click.FloatRange(0, 36_500), help="Remove none younger than DAYS days.", metavar="DAYS")
@click.option("--yes", is_flag=True, help="Remove without asking.")
def clean(place: str | None, keep: int | None, older: float | None, yes: bool) -> None:
    """Remove run directories in RUNS: $TRITIUM_RUNS, or tritium-runs here.

    With --keep and --older, those that are neither among the newest N nor younger than DAYS days. Only directories that
    Tritium has named by the run's id, and whose run has ended, are removed, with the checkpoints and models in them.
    """
    if keep is None and older is None:
        raise click.UsageError("Say which runs to keep: tritium clean --keep 20, or --older 30 (days), or both.")
    folder = runs.folder_of(place)
    kept = runs.kept_in(folder)
    old = runs.to_remove(kept, keep or 0, older or 0.0)
    unfinished = sum(not run.ended for run in kept)
    still = f"; {unfinished} of those that stay may be running" if unfinished else ""
    if not old:
        click.echo(f"None of the {len(kept)} runs in {folder} is to be removed{still}.")
        return
    for run in old:
        click.echo(f"{run.path.name}  {run.started:%Y-%m-%d %H:%M}  {run.bytes / 1e6:10,.1f} MB")
    click.echo(f"{len(old)} of the {len(kept)} runs in {folder}, with all their files{still}.")
    if not yes:
        click.confirm("Remove them?", abort=True)
    for run in old:
        run.remove()
    click.echo(f"Removed {len(old)} runs.")
