"""Which kernels compute attention on CUDA, and what documents and windows cost in memory, by the
stub driver: flash kernels in the place of cuDNN's, and no numbers."""

import json

import pytest

from tests.ghost.attention import MASKS

FLASH = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}
EFFICIENT = {kernel.replace("flash", "efficient") for kernel in FLASH}
VARLEN = {"_varlen_attn", "_varlen_attn_backward"}


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_no_scores_are_computed_as_a_whole_and_the_host_reads_nothing(ghost, capability):
    """Grouped heads, each mask, deterministic or not."""
    output = ghost("python", "-m", "tests.ghost.attention", GHOST_CAPABILITY=capability)
    found = {case: set(kernels) for case, kernels in json.loads(output.splitlines()[-1]).items()}
    assert any("softmax" in kernel for kernel in found.pop("control"))
    expected = {}
    for name in MASKS:
        fused = FLASH if name == "plain" else EFFICIENT
        for deterministic in (False, True):
            expected[f"auto {name} {deterministic}"] = FLASH if name == "plain" else VARLEN
            expected[f"sdpa {name} {deterministic}"] = fused
            expected[f"varlen {name} {deterministic}"] = VARLEN
        expected[f"float32 {name}"] = EFFICIENT
    assert found == expected


def test_a_run_is_refused_where_xformers_has_no_kernels_for_this_cuda(ghost, tmp_path):
    """The wheel on PyPI, for CUDA 12, has none for torch's, which is for 13."""
    (tmp_path / "words.jsonl").write_text('{"text": "some text"}\n' * 9)
    config = "config=apps/main/configs/small.yaml model.attn_impl=fmha 'data.sources={words: 1}'"
    folders = f"data.root_dir={tmp_path} dump_dir={tmp_path}/run"
    command = f"python -m apps.main.train {config} {folders} 2>&1"
    output = ghost("bash", "-c", f"{command}; test $? = 2")
    for part in ("model.attn_impl = fmha", "CUDA 13", "configuration.md", "auto takes one"):
        assert part in output, output
    assert "Traceback" not in output and not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(("seq_len", "rows"), [(4096, 4), (16384, 1)])
def test_documents_and_windows_cost_little_memory(ghost, seq_len, rows):
    def peak_gib(*keys: str) -> float:
        output = ghost(
            *("python", "-m", "tests.ghost.memory", "config=apps/main/configs/llama_1B.yaml"),
            *(f"data.seq_len={seq_len}", f"data.batch_size={rows}"),
            *(f"data.global_batch_size={rows}", "model.vocab_size=128256"),
            *("model.n_kv_heads=4", *keys),
        )
        return json.loads(output.splitlines()[-1])["step_gib"]

    plain = peak_gib()
    for key in ("data.document_mask=ignore", "model.sliding_window=1024"):
        assert peak_gib(key) - plain <= 0.5
