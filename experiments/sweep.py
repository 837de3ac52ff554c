"""Runs a sweep: every variant with every seed, as submitit jobs.

    python experiments/sweep.py experiments/ablations/components.yaml --jobs 2

A sweep file has these keys; options of `margrpo fit` are written nested or dotted.

    base: experiments/nova-tiny.yaml          # the configuration that every run starts from
    common: {trainer.max_steps: 50}           # options of every run; may be absent
    variants:                                 # named sets of options, each on its own
      - name: fixed_head
        overrides: {model: {train_head: false}}
        published: 28.65                      # what the paper reports for it, for the report; may be absent
    grid:                                     # all combinations of these values, for every variant
      data.rollout.critical_fraction: [0.1, 0.3]
    seeds: [1, 2, 3]                          # of `seed_everything` and `data.seed`

A run lives in `runs/<sweep>/<what differs from the base>/seed<k>`; `sweep.json` there says what it is, and `submitit/`
holds its log. After an interruption the same command goes on: a run with a `summary.json` is finished and skipped, the
others continue from their newest checkpoint. The exit status is 1 if a run failed, 2 if nothing was started.
"""

import argparse
import collections
import fcntl
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import submitit
import torch
import yaml
from jsonargparse import ArgumentError

from margrpo.callbacks.summary import RunSummary
from margrpo.cli import RunCLI
from margrpo.module import MARGRPO, OptimizerConfig
from margrpo.objective.loss import ObjectiveConfig
from margrpo.rollout.config import RolloutConfig
from margrpo.rollout.datamodule import RolloutDataModule

KEYS = ("base", "common", "variants", "grid", "seeds")
DECIDED_HERE = ("seed_everything", "data.seed", "ckpt_path", "trainer.logger")
DAY_MINUTES = 24 * 60
LOG_LINES = 15

Options = dict[str, Any]
"""Dotted option of `margrpo fit` to value."""


class SweepError(ValueError):
    """A sweep that cannot be run; the message names the file and the key."""


@dataclass(frozen=True)
class Run:
    """One training run.

    `overrides` are without what its seed and directory decide, `order` is its variant's place, and `published` what the
    paper reports for the variant, if anything.
    """

    sweep: str
    base: str
    variant: str
    order: int
    seed: int
    overrides: Options
    published: float | None
    directory: Path

    @property
    def arguments(self) -> list[str]:
        """Arguments of `margrpo`; a version would be a directory below the run's."""
        logger = {"save_dir": str(self.directory), "name": "", "version": ""}
        options = self.overrides | {"seed_everything": self.seed, "data.seed": self.seed}
        options |= {f"trainer.logger.init_args.{key}": value for key, value in logger.items()}
        return ["fit", f"--config={self.base}", *(f"--{key}={_text(value)}" for key, value in options.items())]

    @property
    def finished(self) -> bool:
        """Whether the summary is there, which is written at the end of training only."""
        return (self.directory / "summary.json").is_file()

    def newest_checkpoint(self) -> Path | None:
        """Where an interrupted run goes on from; None before its first checkpoint."""
        checkpoints = (self.directory / "checkpoints").glob("*.ckpt")
        return max(checkpoints, key=lambda file: file.stat().st_mtime, default=None)


class Training(submitit.helpers.Checkpointable):
    """The job of one run; Slurm gets it back when its time is over, and it goes on from its newest checkpoint."""

    def __init__(self, run: Run, environment: dict[str, str]) -> None:
        self.run = run
        self.environment = environment

    def __call__(self) -> None:
        """Train.

        Raises:
            RuntimeError: a job that an earlier, killed sweep left behind is training this run.
            SystemExit: training failed; no traceback, so that the log ends with that of the training.
        """
        directory, checkpoint = self.run.directory, self.run.newest_checkpoint()
        resume = [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]
        with (directory / "lock").open("w") as lock:
            if submitit.JobEnvironment().global_rank == 0:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise RuntimeError(f"{directory}: another job is training this run; wait or end it") from error
                (directory / "config.yaml").unlink(missing_ok=True)  # Lightning refuses to replace it
                for curves in () if resume else directory.glob("events.out.tfevents.*"):
                    curves.unlink()
            command = [sys.executable, "-m", "margrpo", *self.run.arguments, *resume]
            # Training holds the lock too, in case it outlives the job.
            ended = subprocess.run(command, env=os.environ | self.environment, pass_fds=[lock.fileno()], check=False)
        if ended.returncode:
            sys.exit(f"training ended with status {ended.returncode}")


def read_sweep(
    file: Path, base: str | None = None, settings: Options | None = None, output: Path | None = None
) -> list[Run]:
    """Read the runs of a sweep file, seed by seed.

    Args:
        file: the sweep file.
        base: configuration to use in place of the file's.
        settings: options of every run, over the file's `common`.
        output: directory of the sweep; by default runs/<sweep>, with another base runs/<sweep>-<base>.

    Raises:
        SweepError: naming file and key.
        OSError, yaml.YAMLError: the file cannot be read.
    """
    with file.open(encoding="utf-8") as stream:
        content = yaml.safe_load(stream)
    if not isinstance(content, dict) or not content.keys() >= {"base", "seeds"}:
        raise SweepError(f"{file}: base and seeds are required; accepted keys: {', '.join(KEYS)}")
    for key in content.keys() - set(KEYS):
        raise SweepError(f"{file}: unknown key {key!r}; accepted: {', '.join(KEYS)}")
    seeds = _list(f"{file}: seeds", content["seeds"])
    if not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise SweepError(f"{file}: seeds is {seeds}; accepted: different integers from 0 on")
    (variants, published), settings = _variants(file, content), _flat("--set", settings or {})
    for key in settings:
        if any(key in overrides for overrides in variants.values()):
            raise SweepError(f"--set {key}: {file} varies this option")
    common = _flat(f"{file}: common", content.get("common", {})) | settings
    directory = output or Path("runs") / (file.stem if base is None else f"{file.stem}-{Path(base).stem}")
    return [
        Run(
            sweep=directory.name,
            base=base or content["base"],
            variant=name,
            order=order,
            seed=seed,
            overrides=common | overrides,
            published=published.get(name),
            directory=directory / name / f"seed{seed}",
        )
        for seed in seeds
        for order, (name, overrides) in enumerate(variants.items())
    ]


def _variants(file: Path, content: dict[str, Any]) -> tuple[dict[str, Options], dict[str, float]]:
    """Return by directory name the options of each variant, and the figure published for it where there is one."""
    grid = {k: _list(f"{file}: grid: {k}", v) for k, v in _flat(f"{file}: grid", content.get("grid", {})).items()}
    variants: dict[str, Options] = {}
    published: dict[str, float] = {}
    for entry in _list(f"{file}: variants", content.get("variants", [{"name": ""}])):
        if not isinstance(entry, dict) or "name" not in entry or entry.keys() - {"name", "overrides", "published"}:
            raise SweepError(
                f"{file}: variants: {entry} is not a mapping with a name and, if it has any, overrides and published"
            )
        if not isinstance(entry.get("published", 0.0), int | float):
            raise SweepError(f"{file}: variants: {entry['name']}: published is {entry['published']!r}, not a number")
        overrides = _flat(f"{file}: variants: {entry['name']}", entry.get("overrides", {}))
        for key in overrides.keys() & grid.keys():
            raise SweepError(f"{file}: variants: {entry['name']}: {key} is in the grid too")
        for values in itertools.product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            words = [str(entry["name"]), *(f"{key.rpartition('.')[2]}={_text(point[key])}" for key in grid)]
            name = ",".join(filter(None, words)) or "base"
            if not re.fullmatch(r"[\w.,=+-]+", name):
                raise SweepError(f"{file}: {name!r} is to name a directory; accepted: letters, digits, _ . , = + -")
            if name in variants:
                raise SweepError(f"{file}: there are two variants {name}")
            variants[name] = overrides | point
            if "published" in entry:
                published[name] = float(entry["published"])
    return variants, published


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise SweepError(f"{where} is {value!r}; accepted: a list that is not empty")
    return value


def _flat(where: str, options: Any, prefix: str = "") -> Options:
    if not isinstance(options, dict):
        raise SweepError(f"{where} is {options!r}; accepted: a mapping of options")
    flat: Options = {}
    for key, value in options.items():
        inner = _flat(where, value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        for option in inner:
            if option.startswith(DECIDED_HERE):
                raise SweepError(f"{where}: {option} follows from the seeds and directories of the sweep")
            if option in flat:
                raise SweepError(f"{where}: {option} is there twice")
        flat |= inner
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class OptionParser(RunCLI):
    """`margrpo fit` up to the parsed options; nothing is built from them."""

    def instantiate_classes(self) -> None:
        """Load no model."""


def check_options(file: Path, runs: list[Run]) -> None:
    """Check the options of every variant as `margrpo fit` would, before any run starts.

    Raises:
        SweepError: naming the variant and the option.
    """
    for run in {run.variant: run for run in runs}.values():
        arguments = [*run.arguments[1:], "--seed_everything=false"]  # else this process would be seeded
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "LightningCLI's args parameter")
                config = OptionParser(
                    MARGRPO,
                    RolloutDataModule,
                    args=arguments,
                    run=False,
                    auto_configure_optimizers=False,
                    parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
                ).config
            RolloutConfig(**config.data.rollout.as_dict())
            ObjectiveConfig(**config.model.objective.as_dict())
            OptimizerConfig(**config.model.optimizer.as_dict())
        except (ArgumentError, ValueError) as error:
            raise SweepError(f"{file}: {run.variant}: {error}") from error
        callbacks = [callback.class_path for callback in config.trainer.callbacks or []]
        if f"{RunSummary.__module__}.{RunSummary.__name__}" not in callbacks:
            raise SweepError(f"{run.base}: trainer.callbacks lacks RunSummary, whose file marks a finished run")


def check_directories(runs: list[Run]) -> None:
    """Check that no directory holds a run with other options.

    Raises:
        SweepError: naming the directory and the option.
    """
    for run in runs:
        file = run.directory / "sweep.json"
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else asdict(run)
        there, here = {"base": record["base"]} | record["overrides"], {"base": run.base} | run.overrides
        for key in sorted(there.keys() | here.keys()):
            old, new = (_text(options.get(key)) for options in (there, here))
            if old != new:
                raise SweepError(f"{run.directory}: is a run with {key} {old}, not {new}; remove it, or use --output")


def submit(run: Run, cluster: str, environment: dict[str, str], parameters: dict[str, Any]) -> submitit.Job[None]:
    """Hand a run to submitit."""
    run.directory.mkdir(parents=True, exist_ok=True)
    record = {key: value for key, value in asdict(run).items() if key != "directory"}
    (run.directory / "sweep.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    executor = submitit.AutoExecutor(run.directory / "submitit", cluster=cluster)
    executor.update_parameters(name=run.sweep, timeout_min=DAY_MINUTES, stderr_to_stdout=True, **parameters)
    return executor.submit(Training(run, environment))


def execute(runs: list[Run], cluster: str, jobs: int, parameters: dict[str, Any]) -> list[str]:
    """Run at most `jobs` runs at a time; return a paragraph on each that failed."""
    environment = {}
    if cluster == "local":  # submitit hides the GPUs from local jobs, and each job would use all cores
        gpus = ",".join(map(str, range(torch.cuda.device_count())))
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", gpus)
        environment["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // jobs))
    waiting = collections.deque(runs)
    running: list[tuple[Run, submitit.Job[None]]] = []
    failures = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.popleft()
                print(f"{run.directory}: {'starts' if run.newest_checkpoint() is None else 'resumes'}", flush=True)
                running.append((run, submit(run, cluster, environment, parameters)))
            time.sleep(0.5)
            ended = [pair for pair in running if pair[1].done()]
            running = [pair for pair in running if pair not in ended]
            for run, job in ended:
                print(f"{run.directory}: {'finished' if run.finished else 'FAILED'}", flush=True)
                if not run.finished:
                    lines = (job.stdout() or "").splitlines()[-LOG_LINES:]
                    failures.append("\n  ".join([f"{run.directory} failed; {job.paths.stdout} ends with", *lines]))
    finally:
        for _, job in running:
            job.cancel(check=False)
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Run a sweep; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="sweep file, such as experiments/ablations/components.yaml")
    parser.add_argument("--dry-run", action="store_true", help="list directories and commands, run nothing")
    parser.add_argument("--jobs", type=int, help="runs at a time; by default 1, and all with Slurm")
    parser.add_argument("--base", help="configuration to start from, in place of the sweep file's")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="option of every run")
    parser.add_argument("--output", type=Path, help="directory of the sweep, in place of runs/<sweep>")
    parser.add_argument("--cluster", choices=("local", "slurm"), default="local")
    of_slurm = "parameter of submitit for Slurm, such as partition=gpu, gpus_per_node=8 or timeout_min=600"
    parser.add_argument("--slurm", action="append", default=[], metavar="KEY=VALUE", help=of_slurm)
    options = parser.parse_args(arguments)
    for pair in (*options.set, *options.slurm):
        if "=" not in pair:
            parser.error(f"{pair} has no value; expected KEY=VALUE")
    if options.slurm and options.cluster != "slurm":
        parser.error("--slurm is for --cluster slurm")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    settings = dict(pair.split("=", 1) for pair in options.set)
    parameters = {f"slurm_{key}": yaml.safe_load(value) for key, value in (p.split("=", 1) for p in options.slurm)}
    try:
        runs = read_sweep(options.sweep, options.base, settings, options.output)
        check_options(options.sweep, runs)
        check_directories(runs)
    except (SweepError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))
    if options.dry_run:
        for run in runs:
            state = "finished" if run.finished else "new" if run.newest_checkpoint() is None else "interrupted"
            print(f"{run.directory}: {state}\n  {shlex.join(['margrpo', *run.arguments])}")
        return 0
    left = [run for run in runs if not run.finished]
    print(f"{len(runs)} runs, {len(runs) - len(left)} of them finished already", flush=True)
    jobs = options.jobs or (1 if options.cluster == "local" else len(runs))
    failures = execute(left, options.cluster, jobs, parameters)
    print("\n\n".join([f"{len(runs) - len(failures)} of {len(runs)} runs are finished", *failures]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
