"""Which tests `make check` leaves out: sweeps, programs started as commands, and tests that wait for timeouts.

Measured with ``pytest --durations=150``; each of these took more than two seconds of the processor, or its module more
than five.
"""

FOLDERS_AND_FILES = (
    "crash/",
    "deploy/",
    "elastic/",
    "server/",
    "checkpoint/converting/test_published_models.py",
    "checkpoint/reading/test_readers_alone.py",
    "checkpoint/resharding/test_interrupted.py",
    "checkpoint/resharding/test_reads.py",
    "checkpoint/test_memory.py",
    "cli/test_examples.py",
    "cli/test_process.py",
    "cli/test_reshard_workers.py",
    "comm/test_background_threads.py",
    "coordination/test_fallback.py",
    "coordination/test_faulty.py",
    "coordination/test_grpc_client.py",
    "coordination/test_model.py",
    "coordination/test_names.py",
    "coordination/test_outages.py",
    "coordination/test_torch_store.py",
    "dtensor/operators/test_aliases.py",
    "dtensor/operators/test_compile.py",
    "dtensor/operators/test_database.py",
    "dtensor/operators/test_gpt.py",
    "dtensor/operators/test_random_programs.py",
    "dtensor/operators/test_silent_faults.py",
    "dtensor/parallel/test_compile.py",
    "dtensor/test_serialization.py",
    "dtensor/test_torch_logs.py",
    "dtensor/test_visualize.py",
    "format/test_content.py",
    "interop/test_zarr_docs.py",
    "storage/test_commit.py",
    "storage/test_object_store_refusals.py",
    "storage/test_object_stores.py",
    "storage/untrusted/test_compressed_chunks.py",
    "test_demo.py",
    "test_package.py",
    "test_wheels.py",
)
TESTS = (
    "test_a_bar_on_a_terminal",
    "test_a_crash_anywhere_after_going_back",
    "test_a_failure_that_nobody_looked_at_is_logged_at_exit",
    "test_a_forked_process_leaves_the_save_to_its_parent",
    "test_a_plan_for_one_of_many_clients_is_cheap",
    "test_a_process_that_exits_commits_its_save",
    "test_an_older_pytorch_is_refused",
    "test_any_layout_to_any_other",
    "test_attempts_that_live_are_left_alone",
    "test_damage_is_noticed_and_named",
    "test_flipped_bits",
    "test_nothing_is_imported_where_there_is_no_opentelemetry",
    "test_objects_are_measured_before_they_are_read",
    "test_one_process_at_a_time_saves",
    "test_permutations_are_equally_likely",
    "test_random_histories",
    "test_reshard_keeps_every_element",
    "test_rivals_that_try_again_and_again",
    "test_runs_cover_each_value_once",
    "test_saves_in_another_process",
    "test_save_and_restore_on_any_meshes",
    "test_slices_that_cover_a_tensor",
    "test_the_entry_points",
    "test_the_site_is_built_without_a_warning",
    "test_two_leaders_at_once",
    "test_what_changes_afterwards_is_not_saved",
)


def is_slow(file: str, test: str) -> bool:
    """Whether a test is slow.

    Args:
        file: Its file, relative to ``tests/``.
        test: Name of the function.
    """
    return file.startswith(FOLDERS_AND_FILES) or test in TESTS
