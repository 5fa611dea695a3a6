"""Slurm's environment variables; its commands are tested in test_stool.py."""

from lingua.slurm.jobs import environment_of_another


def test_another_job_does_not_inherit_the_variables_of_this_one(monkeypatch) -> None:
    own = ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "PMIX_RANK", "RANK", "LOCAL_WORLD_SIZE")
    own += ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
    own += ("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
    kept = ("SLURM_CONF", "SBATCH_ACCOUNT", "HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    for name in (*own, *kept):
        monkeypatch.setenv(name, "1")
    env = environment_of_another()
    assert not env.keys() & set(own) and env.keys() >= set(kept)
