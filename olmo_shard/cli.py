"""The command line. Heavy packages are imported when a command runs, not before."""

import faulthandler
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from olmo_shard import __version__
from olmo_shard.errors import ConfigurationError, LaunchError, OlmoShardError, TrainingError

if TYPE_CHECKING:
    from olmo_shard.config import Config
    from olmo_shard.distributed.environment import RankInfo

app = typer.Typer(
    help="Pretrain mixture-of-experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Overrides, such as train.steps=50."),
]


@app.command()
def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Folders, text files, .json[l], .ndjson (.gz, .zst), .parquet."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")] = Path(
        "data/prepared"
    ),
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use.")] = None,
    train_bpe: Annotated[int | None, typer.Option(help="Train a BPE of this many ids.")] = None,
    stdlib: Annotated[bool, typer.Option(help="Take Python's standard library.")] = False,
    text_field: Annotated[
        str, typer.Option(help="Field of JSON and Parquet records; meta.text for a nested one.")
    ] = "text",
    eos: Annotated[str | None, typer.Option(help="Token that ends a document.")] = None,
    add_eos: Annotated[
        bool, typer.Option(help="Add that token (<|endoftext|>) to a tokenizer without one.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option(help="Skip and count bad files and records.")] = False,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of held-out documents, at least one.")
    ] = 0.02,
) -> None:
    """Turn text into token files."""
    from rich.console import Console

    from olmo_shard.data.documents.files import find_files, standard_library_files
    from olmo_shard.data.documents.report import Report
    from olmo_shard.data.prepare import PrepareOptions
    from olmo_shard.data.prepare import prepare as run_prepare
    from olmo_shard.data.termination import ended_by_signals

    # Options that contradict each other are errors before any file is read.
    if (tokenizer is None) == (train_bpe is None):
        raise ConfigurationError("give exactly one of --tokenizer FILE and --train-bpe IDS")
    options = PrepareOptions(
        out=out,
        tokenizer=tokenizer,
        bpe_vocab_size=train_bpe,
        eos=eos,
        add_eos=add_eos,
        validation_fraction=validation_fraction,
    )
    # A signal must also end the native code of the tokenizer.
    console = Console(highlight=False, soft_wrap=True)
    report = Report(skip_bad=skip_bad)
    with ended_by_signals():
        files = find_files(sources or [], text_field, report)
        files += standard_library_files() if stdlib else []
        meta = run_prepare(files, options, console, report)
    counts = ", ".join(
        f"{split} {meta.documents[split]:,} documents, {tokens:,} tokens"
        for split, tokens in meta.tokens.items()
    )
    console.print(f"{out}: {counts}; {meta.vocab_size:,} ids as {meta.dtype}", markup=False)


@app.command()
def check(
    config: ConfigArgument,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of the run to check for.")] = None,
) -> None:
    """Validate a config, its data and its layout, and print it resolved."""
    from olmo_shard.check import check as run_check
    from olmo_shard.config import load_config

    print(run_check(load_config(config, overrides), nproc))


@app.command()
def train(
    config: ConfigArgument,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start this many local ranks (without torchrun).")
    ] = None,
) -> None:
    """Train: alone, as N local ranks (--nproc N), or as a rank under torchrun or SLURM."""
    from olmo_shard.config import load_config
    from olmo_shard.distributed.environment import rank_from_environment

    loaded = load_config(config, overrides)
    info = rank_from_environment()
    # torchrun, SLURM or bare variables have started this process as one rank of several.
    if info is not None:
        if nproc:
            raise LaunchError(
                f"--nproc {nproc} starts ranks, but a launcher's variables say that this is rank "
                f"{info.rank} of {info.world_size}: drop --nproc, or unset RANK and WORLD_SIZE "
                "(under srun: SLURM_STEP_NUM_TASKS)"
            )
        for note in info.notes if info.rank == 0 else ():
            print(note)
        _run_rank(loaded, info)
        return

    # No launcher has started this process: find every mistake before any rank starts.
    from olmo_shard.train.checks import SCAN_LIMIT_BYTES, PlannedRun, run_checks

    run_checks(PlannedRun(loaded, nproc or 1, scan_limit=SCAN_LIMIT_BYTES), "launcher")
    if nproc and nproc > 1:
        from olmo_shard.distributed.launch import launch_local

        raise typer.Exit(launch_local(["train", config, *(overrides or [])], nproc))
    _run_rank(loaded, None)


def _run_rank(config: "Config", info: "RankInfo | None") -> None:
    """Train as this rank. An error is also written to the file that the launcher named."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from olmo_shard.distributed.failure import is_lost_peer, launcher_reports
    from olmo_shard.experiment import run

    @record
    def recorded() -> None:
        """Train; ``record`` writes an exception to the launcher's error file."""
        try:
            run(config, info, scanned=info is None or launcher_reports())
        except RuntimeError as error:
            # gloo reports a lost peer as a RuntimeError. Any other one is a fault of this program.
            if info is None or not is_lost_peer(str(error)):
                raise
            first = str(error).splitlines()[0]
            raise TrainingError(
                f"rank {info.rank} lost a peer, or waited longer than run.timeout_seconds = "
                f"{config.run.timeout_seconds} for one: {first}"
            ) from error

    recorded()


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Handle options that stand before the command."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run a command. A user's mistake ends in one message and exit code 2, without a traceback.

    SIGUSR2 prints the stacks of all threads; see ``distributed.rank_files``.
    """
    faulthandler.register(signal.SIGUSR2, file=2)
    # SIGTERM raises SystemExit, so that context managers clean up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except OlmoShardError as error:
        from olmo_shard.distributed.failure import launcher_reports

        # A launcher prints the error itself, once for all ranks.
        if not launcher_reports():
            print(f"olmo-shard: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
