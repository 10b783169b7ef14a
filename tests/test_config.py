"""The configuration: a strict parser, all or nothing, errors that say where and what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mybackend import _C, config

PYTORCH_KEYS = [
    "large_segment_size_mb",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
    "pinned_use_background_threads",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "backend",
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "throw_on_cudamalloc_oom",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "per_process_memory_fraction",
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    config.reset()


def test_all_keys_of_pytorch_are_known() -> None:
    assert set(PYTORCH_KEYS) <= set(config.keys())
    for alias in ("release_lock_on_hipmalloc", "pinned_use_hip_host_register"):
        config.check(f"{alias}:True")
    assert config.check("") == []


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("max_split_size_mb:64", "max_split_size_mb", 64),
        (" max_split_size_mb : 64 , ", "max_split_size_mb", 64),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold", 0.8),
        ("expandable_segments:True", "expandable_segments", True),
        ("expandable_segments:False", "expandable_segments", False),
        ("roundup_power2_divisions:4", "roundup_power2_divisions", [4] * 16),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "roundup_power2_divisions", [1] * 9 + [2, 4] + [8] * 5),
        ("roundup_power2_divisions:[64:0,>:16]", "roundup_power2_divisions", [0] * 7 + [16] * 9),
        ("pinned_num_register_threads:128", "pinned_num_register_threads", 128),
        ("per_process_memory_fraction:0", "per_process_memory_fraction", 0),
        ("per_process_memory_fraction:1.0", "per_process_memory_fraction", 1),
        ("backend:native", "backend", "caching"),
        ("backend:pool", "backend", "pool"),
        ("large_segment_size_mb:64,max_split_size_mb:64", "max_split_size_mb", 64),
        ("max_split_size_mb:64,large_segment_size_mb:64", "large_segment_size_mb", 64),
    ],
)
def test_accepted(text: str, key: str, value: object) -> None:
    config.set(text)
    assert config.get(key) == value
    assert config.origin(key) == "config.set"


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("max_split_size_mb,100", 0, "has no value"),
        ("max_split_size_mb:", 0, "has no value"),
        ("max_split_size_mb:64MB", 0, "'64MB'"),
        ("max_split_size_mb:20.7", 0, "'20.7'"),
        ("max_split_size_mb:-1", 0, "'-1'"),
        ("max_split_size_mb:+64", 0, r"'\+64'"),
        ("max_split_size_mb:19", 0, "below large_segment_size_mb"),
        ("max_split_size_mb:99999999999999999999", 0, "bad value"),
        ("max_non_split_rounding_mb:5", 0, "below large_segment_size_mb"),
        ("large_segment_size_mb:10", 0, "whole MB above 10"),
        ("large_segment_size_mb:64,max_split_size_mb:32", 0, "above max_split_size_mb"),
        ("garbage_collection_threshold:0.5x", 0, "'0.5x'"),
        ("garbage_collection_threshold:0", 0, "between 0 and 1"),
        ("garbage_collection_threshold:1", 0, "between 0 and 1"),
        ("garbage_collection_threshold:nan", 0, "'nan'"),
        ("per_process_memory_fraction:1.01", 0, "from 0 to 1"),
        ("expandable_segments:true", 0, "True or False"),
        ("expandable_segments:1", 0, "True or False"),
        ("expandable_segments:True nonsense", 0, "Truenonsense"),
        ("roundup_power2_divisions:3", 0, "power of two"),
        ("roundup_power2_divisions:0", 0, "power of two"),
        ("roundup_power2_divisions:[256:3]", 0, "power of two"),
        ("roundup_power2_divisions:[100:2]", 0, "power of two"),
        ("roundup_power2_divisions:[256:1,>:2,512:4]", 0, "power of two"),
        ("roundup_power2_divisions:[512:1,256:2]", 0, "power of two"),
        ("roundup_power2_divisions:[256:1", 0, "bad value"),
        ("roundup_power2_divisions:[]", 0, "bad value"),
        ("pinned_num_register_threads:3", 0, "power of two"),
        ("pinned_num_register_threads:256", 0, "power of two"),
        ("backend:cudaMallocAsync", 0, "caching, pool or mmap"),
        ("expandable_segment:True", 0, "did you mean 'expandable_segments'"),
        ("max_split_size_mb:64,abc", 21, "unknown key 'abc'"),
        ("abc", 0, "unknown key 'abc'"),
        (",max_split_size_mb:64", 0, "empty entry"),
        ("max_split_size_mb:64,,backend:pool", 21, "empty entry"),
        ("max_split_size_mb:64,max_split_size_mb:128", 21, "given twice"),
        ("release_lock_on_hipmalloc:True,release_lock_on_cudamalloc:False", 31, "given twice"),
    ],
)
def test_refused(text: str, position: int, words: str) -> None:
    before = config.as_dict()
    with pytest.raises(ValueError, match=words) as caught:
        config.set(text)
    assert f"position {position}:" in str(caught.value)
    with pytest.raises(ValueError, match=words):
        config.check(text)
    assert config.as_dict() == before


def test_one_bad_key_changes_nothing() -> None:
    before = config.as_dict()
    with pytest.raises(ValueError, match=r"'0\.5x'"):
        config.set("max_split_size_mb:64,garbage_collection_threshold:0.5x")
    assert config.as_dict() == before


def test_set_by_name_get_explain_list() -> None:
    config.set(max_split_size_mb=128, expandable_segments=False)
    assert config.get("max_split_size_mb") == 128
    text = config.explain("max_split_size_mb")
    assert "whole MB" in text and "in force: 128 (from config.set)" in text
    with pytest.raises(ValueError, match="did you mean 'max_split_size_mb'"):
        config.get("max_split_size")
    table = config.table()
    assert all(f"| `{key}` |" in table for key in PYTORCH_KEYS)


def test_warnings_about_keys_that_defeat_each_other() -> None:
    with pytest.warns(UserWarning, match="works against expandable_segments"):
        config.set("expandable_segments:True,max_split_size_mb:64")
    config.reset()
    assert any("without a memory fraction" in w for w in config.check("garbage_collection_threshold:0.5"))
    assert config.check("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5") == []
    assert any(
        "never reused" in w for w in config.check("pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:32")
    )


def test_every_key_has_its_effect() -> None:
    for text in (
        "graph_capture_record_stream_reuse:True",
        "pinned_use_background_threads:True,pinned_reserve_segment_size_mb:8",
    ):
        assert config.check(text) == []


def test_settings_reach_the_allocator() -> None:
    torch.ones(1, device="mybackend")
    config.set("max_split_size_mb:64")
    assert torch.mybackend.memory_stats()["max_split_size"] == 64 << 20
    config.set("per_process_memory_fraction:0.25")
    assert torch.mybackend.get_per_process_memory_fraction() == 0.25
    config.reset()
    assert torch.mybackend.memory_stats()["max_split_size"] == -1
    assert torch.mybackend.get_per_process_memory_fraction() == 1.0
    config.set("backend:pool")
    assert _C._memory_kind() == "pool"


def test_keys_that_are_read_once() -> None:
    torch.ones(1, device="mybackend")
    with pytest.raises(RuntimeError, match="device_count is read once"):
        config.set("device_count:2")


def test_variables(run_python) -> None:
    code = "from mybackend import config; print(config.get('max_split_size_mb'), config.origin('max_split_size_mb'))"
    assert run_python(code).stdout.split() == ["None", "default"]
    assert run_python(code, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:32").stdout.split() == [
        "32",
        "PYTORCH_CUDA_ALLOC_CONF",
    ]
    assert run_python(
        code, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:32", MYBACKEND_ALLOC_CONF="max_split_size_mb:48"
    ).stdout.split() == ["48", "MYBACKEND_ALLOC_CONF"]


def test_a_bad_variable_does_not_break_import_torch(run_python) -> None:
    code = """
        import torch
        print("imported")
        for use in (lambda: torch.ones(1, device="mybackend"), lambda: torch.mybackend.init()):
            try: use()
            except ValueError as error: assert "MYBACKEND_ALLOC_CONF" in str(error) and "did you mean" in str(error), error
            else: raise SystemExit("no error")
        import mybackend
        mybackend.config.set("max_split_size_mb:64")
        assert torch.ones(3, device="mybackend").sum().item() == 3
        """
    done = run_python(code, MYBACKEND_ALLOC_CONF="max_split_size:64")
    assert "imported" in done.stdout and "UserWarning" in done.stderr


def test_sim_options(run_python) -> None:
    run_python(
        """
        import torch
        assert torch.mybackend.device_count() == 2
        assert torch.mybackend.mem_get_info(1) == (64 << 20, 64 << 20)
        x = torch.empty(50 << 20, dtype=torch.uint8, device="mybackend:1")
        try: torch.empty(20 << 20, dtype=torch.uint8, device="mybackend:1")
        except torch.OutOfMemoryError as e: assert "14.00 MiB free of 64.00 MiB" in str(e), e
        else: raise SystemExit("no error")
        """,
        MYBACKEND_ALLOC_CONF="device_count:2,device_memory_mb:64",
    )
