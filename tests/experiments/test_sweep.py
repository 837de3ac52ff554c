"""Sweep files, and what a sweep does with runs that are new, finished, interrupted or broken."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.sweep import SweepError, check_directories, check_options, main, read_sweep, submit

ROOT = Path(__file__).parents[2]
ABLATIONS = sorted((ROOT / "experiments" / "ablations").glob("*.yaml"))
TINY = "experiments/nova-tiny.yaml"
PUBLISHED = {"data.train_prompts": "mine.txt", "data.rewards+": "margrpo.rewards.brightness.Brightness"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def write(tmp_path):
    """Write a sweep file of the given keys."""

    def _write(**content):
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump({"base": TINY, "seeds": [1], **content}, sort_keys=False))
        return file

    return _write


def test_every_variant_runs_with_every_seed_in_a_directory_that_says_what_differs(write):
    variants = [{"name": "plain"}, {"name": "fixed", "overrides": {"model": {"train_head": False}}}]
    grid = {"data.rollout.critical_fraction": [0.1, 0.3], "data": {"rollout": {"consistency_threshold": [None]}}}
    runs = read_sweep(write(variants=variants, grid=grid, common={"trainer.max_steps": 5}, seeds=[1, 2]))
    assert [str(run.directory) for run in runs] == [
        f"runs/mine/{name},critical_fraction={fraction},consistency_threshold=null/seed{seed}"
        for seed in (1, 2)
        for name in ("plain", "fixed")
        for fraction in ("0.1", "0.3")
    ]
    assert [run.order for run in runs] == [0, 1, 2, 3] * 2
    assert runs[-1].overrides == {
        "trainer.max_steps": 5,
        "model.train_head": False,
        "data.rollout.critical_fraction": 0.3,
        "data.rollout.consistency_threshold": None,
    }


def test_the_command_of_a_run_holds_its_options_its_seed_and_its_directory(write):
    (run,) = read_sweep(write(grid={"data.rollout.consistency_threshold": [None]}, seeds=[7]))
    directory = "runs/mine/consistency_threshold=null/seed7"
    assert run.arguments == [
        "fit",
        f"--config={TINY}",
        "--data.rollout.consistency_threshold=null",
        "--seed_everything=7",
        "--data.seed=7",
        f"--trainer.logger.init_args.save_dir={directory}",
        "--trainer.logger.init_args.name=",
        "--trainer.logger.init_args.version=",
    ]


def test_options_of_a_variant_win_over_set_and_set_over_common(write):
    file = write(
        common={"trainer.max_steps": 5, "data.heldout_count": 8, "data.prompts_per_step": 2},
        variants=[{"name": "more", "overrides": {"data.prompts_per_step": 4}}],
    )
    (run,) = read_sweep(file, settings={"trainer.max_steps": "9"})
    assert run.overrides == {"trainer.max_steps": "9", "data.heldout_count": 8, "data.prompts_per_step": 4}


def test_the_figure_that_the_paper_reports_goes_with_every_run_of_its_variant(write):
    runs = read_sweep(
        write(variants=[{"name": "a", "published": 27}, {"name": "b"}], grid={"data.prompts_per_step": [1, 2]})
    )
    assert [(run.variant[0], run.published) for run in runs] == [("a", 27.0), ("a", 27.0), ("b", None), ("b", None)]


def test_another_base_has_another_directory(write, tmp_path):
    assert read_sweep(write(), base="a/big.yaml")[0].directory == Path("runs/mine-big/base/seed1")
    assert read_sweep(write(), output=tmp_path / "out")[0].directory == tmp_path / "out" / "base" / "seed1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"seed": [1]}, "mine.yaml: unknown key 'seed'; accepted: base, common, variants, grid, seeds"),
        ({"seeds": []}, "mine.yaml: seeds is []; accepted: a list that is not empty"),
        ({"seeds": 3}, "mine.yaml: seeds is 3; accepted: a list"),
        ({"seeds": [1, 1]}, "mine.yaml: seeds is [1, 1]; accepted: different integers"),
        ({"seeds": [-1]}, "mine.yaml: seeds is [-1]"),
        ({"seeds": [True]}, "mine.yaml: seeds is [True]"),
        ({"variants": []}, "mine.yaml: variants is []"),
        ({"variants": [{"overrides": {}}]}, "mine.yaml: variants: {'overrides': {}} is not a mapping with a name"),
        ({"variants": [{"name": "a", "override": {}}]}, "is not a mapping with a name"),
        ({"variants": [{"name": "a", "published": "27"}]}, "mine.yaml: variants: a: published is '27', not a number"),
        ({"variants": [{"name": "a"}, {"name": "a"}]}, "mine.yaml: there are two variants a"),
        ({"variants": [{"name": "a/b"}]}, "mine.yaml: 'a/b' is to name a directory; accepted: letters"),
        ({"variants": [{"name": "a", "overrides": 3}]}, "mine.yaml: variants: a is 3; accepted: a mapping"),
        ({"grid": {"data.seed": [1]}}, "mine.yaml: grid: data.seed follows from the seeds"),
        ({"common": {"trainer": {"logger": False}}}, "mine.yaml: common: trainer.logger follows from"),
        ({"grid": {"model.train_head": []}}, "mine.yaml: grid: model.train_head is []"),
        ({"grid": {"model.train_head": [True, True]}}, "mine.yaml: there are two variants train_head=true"),
        ({"common": {"a.b": 1, "a": {"b": 2}}}, "mine.yaml: common: a.b is there twice"),
        (
            {"grid": {"a.b": [1]}, "variants": [{"name": "v", "overrides": {"a": {"b": 2}}}]},
            "mine.yaml: variants: v: a.b is in the grid too",
        ),
    ],
)
def test_a_bad_sweep_file_is_refused_with_file_and_key(write, content, message):
    with pytest.raises(SweepError) as error:
        read_sweep(write(**content))
    assert message in str(error.value)


def test_a_file_without_seeds_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"base: {TINY}\n")
    with pytest.raises(SweepError, match=r"mine\.yaml: base and seeds are required"):
        read_sweep(file)


def test_set_does_not_level_what_the_sweep_varies(write):
    file = write(grid={"data.rollout.critical_fraction": [0.1, 0.3]})
    with pytest.raises(SweepError, match=r"--set data\.rollout\.critical_fraction: .*mine\.yaml varies this option"):
        read_sweep(file, settings={"data.rollout.critical_fraction": "0.5"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.rollout.group_sise": 4}, "group_sise"),
        ({"model.optimizer.learning_rate": "fast"}, "learning_rate"),
        ({"model.optimizer.learning_rate": -1.0}, "learning_rate is -1.0; it must be positive"),
        ({"data.rollout.critical_fraction": 1.5}, "critical_fraction is 1.5; it must lie in"),
        ({"model.objective.kl_weight": -1.0}, "kl_weight is -1.0"),
        ({"trainer.callbacks": []}, "trainer.callbacks lacks RunSummary"),
    ],
)
def test_a_bad_option_of_a_variant_is_named_before_anything_runs(write, overrides, message):
    file = write(variants=[{"name": "good"}, {"name": "bad", "overrides": overrides}])
    with pytest.raises(SweepError) as error:
        check_options(file, read_sweep(file))
    assert message in str(error.value)
    assert "mine.yaml: bad: " in str(error.value) or "RunSummary" in message


@pytest.mark.parametrize(("base", "settings"), [(None, {}), ("experiments/nova-sd512.yaml", PUBLISHED)])
@pytest.mark.parametrize("file", ABLATIONS, ids=lambda file: file.stem)
def test_a_shipped_ablation_is_valid_on_the_tiny_and_on_the_published_model(file, base, settings):
    runs = read_sweep(file, base, settings)
    assert {run.seed for run in runs} == {1, 2, 3}
    assert len({json.dumps(run.overrides, sort_keys=True) for run in runs}) == len(runs) / 3
    check_options(file, runs)


def test_all_ablations_are_shipped():
    assert [file.stem for file in ABLATIONS] == [
        "components",
        "consistency_threshold",
        "critical_fraction",
        "head_learning_rate",
        "include_generating_trajectory",
        "kl",
        "loss_tokens",
        "num_trajectories",
        "score_guided",
        "trajectory_source",
    ]


def test_a_dry_run_lists_directories_and_commands_and_writes_nothing(write, tmp_path, capsys):
    output = tmp_path / "out"
    assert main([str(write(grid={"model.train_head": [True]})), "--output", str(output), "--dry-run"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == f"{output}/train_head=true/seed1: new"
    assert listed[1].startswith(f"  margrpo fit --config={TINY} --model.train_head=true --seed_everything=1")
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (["--set", "trainer.max_steps"], "trainer.max_steps has no value"),
        (["--slurm", "partition=gpu"], "--slurm is for --cluster slurm"),
        (["--base", "none.yaml"], "none.yaml"),
        (["--set", "trainer.max_step=3"], "max_step"),
    ],
)
def test_a_bad_argument_is_refused_with_status_2(write, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main([str(write()), "--dry-run", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_broken_sweep_file_is_named(tmp_path, capsys):
    file = tmp_path / "broken.yaml"
    file.write_text("seeds: [1\n")
    with pytest.raises(SystemExit):
        main([str(file)])
    assert "broken.yaml" in capsys.readouterr().err


def test_a_directory_with_a_run_of_other_options_is_refused(write, tmp_path):
    file, output = write(common={"trainer.max_steps": 5}), tmp_path / "out"
    (run,) = read_sweep(file, output=output)
    run.directory.mkdir(parents=True)
    (run.directory / "sweep.json").write_text(json.dumps({"base": run.base, "overrides": run.overrides}))
    check_directories(read_sweep(file, output=output, settings={"trainer.max_steps": "5"}))
    with pytest.raises(SweepError, match=r"seed1: is a run with trainer\.max_steps 5, not 6; remove it"):
        check_directories(read_sweep(file, output=output, settings={"trainer.max_steps": "6"}))
    with pytest.raises(SweepError, match=r"base experiments/nova-tiny\.yaml, not big\.yaml"):
        check_directories(read_sweep(file, "big.yaml", output=output))


def test_slurm_gets_the_parameters_and_a_job_that_it_can_put_back_into_the_queue(write, tmp_path, monkeypatch):
    for name, script in {"sbatch": "echo Submitted batch job 12", "srun": "", "sacct": ""}.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (run,) = read_sweep(write(), output=tmp_path / "out")
    job = submit(run, "slurm", {}, {"slurm_partition": "gpu", "slurm_gpus_per_node": 8, "slurm_timeout_min": 90})
    assert job.job_id == "12"
    script = (run.directory / "submitit" / "12_submission.sh").read_text()
    for line in ("--partition=gpu", "--gpus-per-node=8", "--time=90", "--job-name=out"):
        assert f"#SBATCH {line}\n" in script
    again = job.submission().function.checkpoint().function
    assert (again.run, again.environment) == (run, {})


@pytest.fixture(scope="module")
def sweep(data_dir, tmp_path_factory):
    """Write a sweep of four-step runs: one good, one that is killed after step 3, one without prompts."""
    folder = tmp_path_factory.mktemp("sweep")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red car\na dog\n", encoding="utf-8")
    base = yaml.safe_load((ROOT / TINY).read_text())
    base["trainer"] |= {"max_steps": 4, "val_check_interval": 2}
    base["model"]["model"]["init_args"]["path_or_repo_id"] = str(data_dir / "nova" / "checkpoint")
    base["data"] |= {
        "train_prompts": str(prompts),
        "heldout_prompts": str(prompts),
        "rewards": [{"class_path": "margrpo.rewards.brightness.Brightness"}],
        "prompts_per_step": 1,
    }
    base["data"]["rollout"] |= {
        "group_size": 2,
        "mask_steps": 4,
        "denoising_steps": 3,
        "trained_mask_steps": 2,
        "trained_denoising_steps": 2,
        "stochastic_steps": None,
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    kill = {
        "class_path": "tests.experiments.interruption.KillOnce",
        "init_args": {"step": 3, "marker": str(folder / "killed")},
    }
    content = {
        "base": str(folder / "base.yaml"),
        "variants": [
            {"name": "good"},
            {"name": "killed", "overrides": {"trainer.callbacks+": [kill]}},
            {"name": "bad", "overrides": {"data.train_prompts": str(folder / "none.txt")}},
        ],
        "seeds": [5],
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _sweep(file):
    """Run the sweep as a user does; return status, output and the run directories by variant."""
    output = file.parent / "out"
    command = [sys.executable, "experiments/sweep.py", str(file), "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, {name: output / name / "seed5" for name in ("good", "killed", "bad")}


@pytest.mark.slow
def test_a_sweep_skips_what_is_finished_resumes_what_was_killed_and_reports_what_fails(sweep):
    status, text, runs = _sweep(sweep)
    good, killed, bad = runs.values()
    assert status == 1
    assert "1 of 3 runs are finished" in text
    assert f"{bad} failed; {bad}/submitit/" in text
    assert "none.txt: no such file" in text.partition("runs are finished")[2]
    names = {file.name for file in good.iterdir()}
    assert names >= {"config.yaml", "checkpoints", "samples", "submitit", "summary.json", "sweep.json"}
    assert list(good.glob("events.out.tfevents.*"))
    assert json.loads((good / "sweep.json").read_text()) == {
        "sweep": "out",
        "base": str(sweep.parent / "base.yaml"),
        "variant": "good",
        "order": 0,
        "seed": 5,
        "overrides": {},
        "published": None,
    }
    config = yaml.safe_load((good / "config.yaml").read_text())
    assert (config["seed_everything"], config["data"]["seed"]) == (5, 5)
    assert not (killed / "summary.json").exists()
    assert (killed / "checkpoints" / "last.ckpt").is_file()

    finished_at = (good / "summary.json").stat().st_mtime_ns
    status, text, _ = _sweep(sweep)
    assert status == 1
    assert "3 runs, 1 of them finished already" in text
    assert f"{killed}: resumes" in text
    assert f"{bad}: starts" in text
    assert "2 of 3 runs are finished" in text
    assert (good / "summary.json").stat().st_mtime_ns == finished_at
    assert len(list((good / "submitit").glob("*_submitted.pkl"))) == 1
    once, resumed = (json.loads((run / "summary.json").read_text()) for run in (good, killed))
    assert resumed["steps"] == once["steps"] == 4
    for key in ("heldout_reward_before", "heldout_reward_after", "kl_final", "gradient_norm_median"):
        assert resumed[key] == once[key], key
    assert not (killed / "checkpoints" / "last-v1.ckpt").exists()


@pytest.mark.slow
def test_a_run_that_another_job_trains_is_left_alone(sweep, tmp_path, monkeypatch):
    (run,) = [run for run in read_sweep(sweep, output=tmp_path / "out") if run.variant == "good"]
    run.directory.mkdir(parents=True)
    with (run.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = submit(run, "local", {}, {})
        job.wait()
    assert "another job is training this run" in job.stdout()
    assert not run.finished
