"""Functions with many cases, of which `scripts/test` runs some and `scripts/test --all` all.

Each case of these takes from half a second to several. Those that run always are spread over the list, so that
every second or third value of each parameter is among them.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

KEPT = {
    "tests/cells/test_company.py::test_bits_do_not_depend_on_the_company": 17,
    "tests/cells/test_models.py::test_classifier_as_torch_nn": 3,
    "tests/cells/test_models.py::test_translator_step_by_step": 1,
    "tests/e2e/test_against_transformers.py::test_in_every_way": 9,
    "tests/e2e/test_early_loads.py::test_tokens_are_those_of_plenty": 2,
    "tests/e2e/test_embeddings.py::test_vectors_are_the_final_hidden_states": 3,
    "tests/e2e/test_quantized_kv.py::test_every_turn_by_an_engine_of_its_own": 1,
    "tests/e2e/test_quantized_kv.py::test_neither_company_nor_history_nor_suspension_changes_a_token": 1,
    "tests/e2e/test_quantized_kv.py::test_structured_output_and_samples": 1,
    "tests/e2e/test_restart.py::test_every_turn_by_an_engine_of_its_own": 2,
    "tests/e2e/test_restart.py::test_holes_are_computed_again": 1,
    "tests/e2e/test_sparse_v.py::test_neither_company_nor_history_nor_suspension_changes_a_token": 1,
    "tests/e2e/test_sparse_v.py::test_offloaded_models_give_the_resident_engines_tokens": 1,
    "tests/e2e/test_tiers.py::test_tokens_from_the_host_are_those_of_plenty": 2,
    "tests/engine/test_continued.py::test_the_rest_is_that_of_an_undisturbed_run": 3,
    "tests/engine/test_continued_everywhere.py::test_behind_each_token": 1,
    "tests/hostile/test_batches.py::test_deep_bodies_fail_alone": 2,
    "tests/hostile/test_campaigns.py::test_tokens_are_those_of_a_run_alone": 1,
    "tests/hostile/test_connections.py::test_who_does_not_come_to_an_end_is_closed": 2,
    "tests/hostile/test_grammars.py::test_it_is_refused_and_the_next_one_is_tried": 3,
    "tests/hostile/test_surrogates.py::test_numbers_of_hundreds_of_digits_are_no_defect": 2,
    "tests/hostile/test_templates.py::test_it_is_ended_and_the_next_one_is_answered": 4,
    "tests/models/test_layouts.py::test_the_bytes_are_the_planners": 2,
    "tests/models/test_loader.py::test_peak_memory_is_the_weights_the_largest_layer_and_400_mb": 1,
    "tests/models/test_quantized_configs.py::test_a_wrong_config_is_refused_or_does_no_harm": 8,
    "tests/ops/test_attention_hopper.py::test_without_defects_the_same_passes": 2,
    "tests/ops/test_attention_unified.py::test_half_precision_is_right_however_scores_rise_or_fall": 2,
    "tests/ops/test_linear_bytes.py::test_emulated": 2,
    "tests/ops/test_linear_bytes.py::test_the_emulator_finds_planted_defects": 1,
    "tests/ops/test_linear_nibbles.py::test_emulated": 2,
    "tests/ops/test_linear_nibbles.py::test_the_emulator_finds_planted_defects": 2,
    "tests/ops/test_linear_nibbles.py::test_the_matrix_written_out_emulated": 1,
    "tests/ops/test_rows_alone.py::test_products": 5,
    "tests/ops/test_rows_alone.py::test_products_in_whole_numbers": 3,
    "tests/ops/test_rows_alone.py::test_quantized_products": 7,
    "tests/ops/test_sampling.py::test_all_of_the_kept_tokens_are_drawn_and_no_other": 3,
    "tests/ops/test_sparse_attention.py::test_other_dtypes": 1,
    "tests/planner/test_shards.py::test_a_rank_stores_what_the_planner_says": 2,
    "tests/quant/test_accuracy.py::test_the_demo_model_loses_little": 2,
    "tests/quant/test_packed.py::test_the_expanded_matrix_is_the_definitions": 4,
    "tests/runtime/offload/test_offloaded.py::test_kv_in_host_memory_gives_the_resident_engines_tokens": 4,
    "tests/runtime/offload/test_offloaded.py::test_places_that_are_too_small_are_named": 1,
    "tests/runtime/offload/test_offloaded.py::test_planted_bugs_change_tokens": 1,
    "tests/runtime/offload/test_offloaded.py::test_records_of_the_disk_pass_buffers_where_slots_are_elsewhere": 2,
    "tests/runtime/offload/test_offloaded.py::test_sequences_that_begin_one_after_another_have_the_same_tokens": 2,
    "tests/runtime/offload/test_offloaded.py::test_tokens_are_those_of_the_resident_engine": 2,
    "tests/runtime/offload/test_quantized.py::test_k_and_v_in_fewer_bits_on_the_device_and_in_host_memory": 2,
    "tests/runtime/offload/test_quantized.py::test_quantized_checkpoints_are_streamed_in_their_bits": 1,
    "tests/runtime/offload/test_quantized.py::test_tokens_are_those_of_the_resident_quantized_engine": 2,
    "tests/schedule/cells/test_scheduler.py::test_requests_that_no_call_could_reach_wait_and_nothing_else_changes": 1,
    "tests/schedule/cells/test_small_tasks.py::test_at_once_is_one_by_one": 3,
    "tests/server/test_late_masks.py::test_late_masks_change_no_token": 2,
    "tests/server/test_limits.py::test_a_client_that_hangs_up_is_dropped": 2,
    "tests/server/test_long_prompts.py::test_what_cannot_fit_is_not_tokenized": 3,
    "tests/server/test_masks.py::test_suspended_rows_go_on_where_their_grammar_stood": 1,
    "tests/server/test_request_id.py::test_without_one_it_is_the_requests_own_id": 2,
    "tests/server/test_structured.py::test_a_loop_of_three_steps": 2,
    "tests/server/test_work.py::test_more_than_a_request_may_ask_is_refused": 3,
    "tests/simulate/test_simulator.py::test_a_convoy_of_loads_delays_nobody_who_needs_none": 1,
}
"""Function: how many of its cases run always."""


def thin(items: list[pytest.Item]) -> None:
    """Mark the other cases long. What is asked for by its own name runs."""
    families: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.iter_markers("long")) and not any(item.iter_markers("gpu")):
            families[item.nodeid.partition("[")[0]].append(item)
    for name, kept in KEPT.items():
        cases = families.get(name, [])
        always = {k * len(cases) // kept for k in range(kept)}
        for k, case in enumerate(cases):
            if k not in always:
                case.add_marker(pytest.mark.long)
