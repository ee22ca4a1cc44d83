from services.launcher.options.serve import FLAGS, JSON_FLAGS, LISTS, SHORT, SWITCHES, ServeOptions
from services.launcher.settings import UpSettings


def test_every_flag_has_a_description_and_none_is_also_a_setting() -> None:
    for name, field in ServeOptions.model_fields.items():
        assert field.description, name
    assert not set(ServeOptions.model_fields) & set(UpSettings.model_fields)


def test_short_forms_stand_for_flags_that_exist() -> None:
    assert set(SHORT.values()) <= set(FLAGS)
    assert len(set(SHORT.values())) == len(SHORT)


def test_flags_are_sorted_by_what_follows_them() -> None:
    assert {"headless", "enforce_eager"} <= SWITCHES
    assert {
        "compilation_config",
        "speculative_config",
        "kv_transfer_config",
        "profiler_config",
        "structured_outputs_config",
        "additional_config",
    } == JSON_FLAGS
    assert set(ServeOptions.model_fields) >= LISTS
