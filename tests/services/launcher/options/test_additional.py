import pytest

from services.launcher.options.additional import AdditionalConfig
from services.launcher.options.fields import Options, groups_in


def groups(model: type[Options]) -> list[type[Options]]:
    inner = [
        group for field in model.model_fields.values() for group in groups_in(field.annotation)
    ]
    return [model, *(deeper for group in inner for deeper in groups(group))]


@pytest.mark.parametrize("group", groups(AdditionalConfig), ids=lambda group: group.__name__)
def test_every_key_says_what_it_is_for(group: type[Options]) -> None:
    for name, field in group.model_fields.items():
        assert field.description or groups_in(field.annotation), name


def test_unknown_keys_are_kept_to_be_told() -> None:
    assert AdditionalConfig(some_key=1).model_extra == {"some_key": 1}  # type: ignore[call-arg]


def test_nothing_is_on_by_itself() -> None:
    on = [name for name, value in AdditionalConfig() if value is True]
    assert not on
