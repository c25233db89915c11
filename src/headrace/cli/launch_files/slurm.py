"""A script for sbatch."""

from __future__ import annotations

from headrace.cli.launch_files.request import LaunchRequest, shell

_SCRIPT = """\
#!/bin/bash
# Written by headrace launch-files. Run it where headrace is in the PATH: sbatch {file}
{options}
set -u

# By it the tasks tell strangers from each other. srun passes it on, and no command line shows it.
export HEADRACE_SECRET=${{HEADRACE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}}
# The same for all attempts of this job, on a file system of all nodes.
run_dir={run_dir}

# scancel and preemption tell this shell, too. It waits for the tasks, which save.
trap : TERM
srun --cpus-per-task={cores} --kill-on-bad-exit=0 \\
    {command}
code=$?

# 143: SLURM has asked the tasks to end, {save_s} s before the time limit, and they have saved: another attempt goes on
# from there. A job that scancel ends, or that SLURM itself requeues, does not run any more.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [[ $code == 143 && $state == RUNNING ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_script(wanted: LaunchRequest, time_limit: str) -> str:
    """Returns the script; `time_limit` as sbatch takes it."""
    memory = {"mem-per-cpu": f"{round(1024 * wanted.memory_gb / wanted.cores)}M"} if wanted.memory_gb else {}
    options = {
        "job-name": wanted.name,
        "nodes": wanted.hosts or 1,
        "ntasks": wanted.workers,
        "cpus-per-task": wanted.cores,
        **memory,
        **({"distribution": "cyclic"} if wanted.cyclic else {}),
        "time": time_limit,
        "output": f"{wanted.name}-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{wanted.save_s}",
    }
    lines = [*(f"#SBATCH --{name}={value}" for name, value in options.items()), "#SBATCH --requeue"]
    return _SCRIPT.format(
        file=wanted.file.name,
        options="\n".join(lines),
        run_dir=shell([wanted.run_dir]) if wanted.run_dir else f"runs/{wanted.name}-$SLURM_JOB_ID",
        cores=wanted.cores,
        command=shell(wanted.train("$run_dir")),
        save_s=wanted.save_s,
    )
