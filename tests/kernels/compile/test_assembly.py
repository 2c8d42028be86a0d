"""The readers of what assembler, disassembler and XLA print."""

from __future__ import annotations

import pytest

from pallas_kernels.aot import assembly

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_prefill' for 'sm_90a'
ptxas info    : Function properties for paged_prefill
    24 bytes stack frame, 40 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 12.000 ms
ptxas info    : Compiling entry function 'write_kv' for 'sm_90a'
ptxas info    : Function properties for write_kv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""

DISASSEMBLY = """\
	.target	sm_90a
	.section	.text.write_kv,"ax",@progbits
        .global         write_kv
write_kv:
.text.write_kv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 STG.E.128 desc[UR4][R2.64], R4 ;
        /*0020*/                   EXIT ;
	.section	.text.paged_prefill,"ax",@progbits
.text.paged_prefill:
        /*0000*/              @!UP0 UTMALDG.2D [UR8], [UR6] ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""

THUNKS = """\
001: kCustomKernel [source       | next=002 (1)] paged_decode grid: [8, 8, 4] threads: [128, 1, 1]\
  shared_memory: 38912 bytes
002: kCustomKernel [prev=001 (1) | sink        ] paged_decode grid: [9, 8, 1] threads: [64, 2, 2]\
  shared_memory: 1024 bytes
003: kCustomCall [source | sink] kCustomCall
"""


def test_assembler_log_gives_every_kernel_with_its_own_figures():
    prefill, write = assembly.read_assembler_log(LOG)
    assert (prefill.name, prefill.target, prefill.registers) == ("paged_prefill", "sm_90a", 255)
    assert (prefill.spill_bytes, prefill.stack_bytes, prefill.shared_bytes) == (96, 24, 1024)
    assert (write.name, write.registers, write.spill_bytes, write.shared_bytes) == (
        "write_kv",
        32,
        0,
        0,
    )


def test_kernel_without_statistics_is_an_error_not_a_kernel_without_spills():
    cut = LOG.partition("    24 bytes stack")[0]
    with pytest.raises(ValueError, match="statistics of a kernel"):
        assembly.read_assembler_log(cut)


def test_opcodes_are_counted_by_function_without_modifiers_and_predicates():
    counts = assembly.count_instructions(DISASSEMBLY)
    assert counts == {
        "write_kv": {"LDC": 1, "STG": 1, "EXIT": 1},
        "paged_prefill": {"UTMALDG": 1, "HGMMA": 2},
    }


def test_largest_launch_of_a_kernel_counts():
    assert assembly.read_launches(THUNKS) == {"paged_decode": ((9, 8, 4), 256, 38912)}


def test_mosaic_resources_are_read_in_order():
    text = "Resources(smem_scratch_bytes=83968, tmem=0)\nx\nResources(smem_scratch_bytes=7, tmem=0)"
    assert assembly.read_mosaic_resources(text) == [83968, 7]


def test_text_without_kernels_has_none():
    assert assembly.read_assembler_log("ptxas info    : 0 bytes gmem\n") == []
    assert assembly.count_instructions("\t.target\tsm_90a\n") == {}
