"""What tests of bench share: tiny workloads, a clock that tells set times, a played DeepGEMM."""

from __future__ import annotations

import types

import torch

from mxfp8_cutlass.bench.workloads import Workload

EVEN = Workload("even", 3, 96, 48, 160)
SKEWED = Workload("skewed", 16, 400, 32, 96, split="zipf")
DECODE = Workload("decode", 4, 6, 32, 256, kind="masked")
OURS = ("folded", "exact", "fold activations")


class FakeTimer:
    """Each mark comes one millisecond after the last one, and so does each look at the host's clock."""

    def __init__(self):
        self.events = []
        self.time = 0

    def mark(self):
        self.time += 1
        self.events.append("mark")
        return self.time

    def elapsed_ms(self, start, stop):
        assert self.events[-1] == "wait", "a mark may not have happened yet"
        return float(stop - start)

    def wait(self):
        self.events.append("wait")

    def flush(self):
        self.events.append("flush")

    def host_s(self):
        self.time += 1
        return self.time / 1000


def played_deep_gemm():
    """DeepGEMM's interface as far as it is used, with float32 products of what it is given."""

    def weights(b, group):
        data, scale = b[0][group].float(), b[1][group]
        return data * scale.repeat_interleave(128, 0)[: data.shape[0]].repeat_interleave(128, 1)[:, : data.shape[1]]

    def rows(data, scale):
        assert scale.stride(-2) == 1, "scales are to be laid out beforehand"
        assert scale.shape[-1] == 1 or scale.stride(-1) % 4 == 0, "columns are read by TMA"
        return data.float() * scale.repeat_interleave(128, -1)[..., : data.shape[-1]]

    def contiguous(a, b, out, groups, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast
        assert groups.dtype == torch.int32
        assert len(groups) == len(out) == len(a[0])
        assert len(out) % 128 == 0
        for block in range(0, len(out), 128):
            part = slice(block, block + 128)
            (group,) = groups[part].unique().tolist()
            out[part] = rows(a[0][part], a[1][part]) @ weights(b, group).mT

    def masked(a, b, out, counts, expected, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast
        assert counts.dtype == torch.int32
        assert out.shape[1] % 64 == 0
        assert 0 < expected <= out.shape[1]
        for group, count in enumerate(counts.tolist()):
            out[group, :count] = (rows(a[0][group], a[1][group]) @ weights(b, group).mT)[:count].bfloat16()

    return types.SimpleNamespace(
        m_grouped_fp8_fp4_gemm_nt_contiguous=contiguous,
        m_grouped_fp8_gemm_nt_masked=masked,
        get_mk_alignment_for_contiguous_layout=lambda: 128,
    )
