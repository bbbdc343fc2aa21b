"""Who may set budgets and prices, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import call_command

from adapters.access import names_for, priceable_names, unknown_name_warning
from adapters.models import Adapter, AdapterAlias
from catalog.models import ServedModel
from common.errors import NotFound, PermissionDenied
from engine.contract.errors import InvalidRequest
from metering import actions
from metering.models import Budget
from tenants.models import AuditEntry
from tests.platform.budgets import budget, price
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("with_redis")]
database = pytest.mark.database


@database
@pytest.mark.parametrize(
    ("who", "of_tenant", "of_key"),
    [
        ("operator", None, None),
        ("owner", PermissionDenied, None),
        ("admin", PermissionDenied, None),
        ("member", PermissionDenied, PermissionDenied),
        ("viewer", PermissionDenied, PermissionDenied),
        ("outsider", NotFound, NotFound),
    ],
)
def test_operators_set_a_tenants_budgets_and_its_admins_those_of_keys(
    world: World, who: str, of_tenant: Any, of_key: Any
) -> None:
    for of, refused in ((None, of_tenant), (world.key, of_key)):
        fields = {"tenant": world.acme, "period": "day", "key": of, "tokens": 5}
        if refused is None:
            budget = actions.set_budget(actor=world.user(who), **fields)
            actions.delete_budget(actor=world.user(who), budget=budget)
        else:
            with pytest.raises(refused):
                actions.set_budget(actor=world.user(who), **fields)
    expected = {"operator": 4, "owner": 2, "admin": 2}.get(who, 0)
    assert AuditEntry.objects.filter(action__startswith="budget.").count() == expected


@database
@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 2**60}, "tokens"),
        ({"amount": "a lot"}, "amount"),
        ({"amount": "-1"}, "amount"),
        ({"amount": "NaN"}, "amount"),
        ({"amount": "1e300"}, "amount"),
        ({"amount": "0.0000000001"}, "amount"),
        ({"tokens": 1, "period": "year"}, "period"),
        ({"tokens": 1, "alert_percent": 101}, "alert_percent"),
    ],
)
def test_bad_budgets_are_refused_by_name(world: World, values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        budget(world, **{"period": "day", **values})
    assert caught.value.param == param
    assert not Budget.objects.exists()


@database
def test_a_budget_is_changed_in_place_and_another_tenants_key_is_unknown(world: World) -> None:
    first = budget(world, tokens=5)
    assert budget(world, amount="1.5") == first
    first.refresh_from_db()
    assert (first.tokens, str(first.amount)) == (None, "1.500000000")
    entry = AuditEntry.objects.filter(action="budget.update").get()
    assert entry.details["changes"] == {"tokens": [5, None], "amount": [None, "1.5"]}
    with pytest.raises(NotFound):
        budget(world, key=world.rival_key, tokens=5)


@database
def test_prices_are_the_operators_and_never_change_the_past(world: World) -> None:
    with pytest.raises(PermissionDenied):
        actions.set_price(
            actor=world.owner, model="m", input_per_million="1", output_per_million="1"
        )
    with pytest.raises(InvalidRequest, match="past"):
        price(valid_from=datetime.now(UTC) - timedelta(hours=1))
    for bad in ("x", "-1", "inf", "1e9", "0.0000001"):
        with pytest.raises(InvalidRequest):
            price(input_per_million=bad)
    price()
    entry = AuditEntry.objects.filter(action="price.set").get()
    assert entry.details["output_per_million"] == "2"


@database
def test_names_that_nothing_has_are_told(world: World) -> None:
    for model, public in (("quill", True), ("shelved", True), ("hidden", False)):
        ServedModel.objects.create(name=model, source="demo/model", public=public)
    rows = {name: ServedModel.objects.get(name=name) for name in ("quill", "hidden")}
    for name, base, tenant in (
        ("tone", "quill", world.acme),
        ("shared", "quill", None),
        ("theirs", "quill", world.rival),
    ):
        adapter = Adapter.objects.create(tenant=tenant, served_model=rows[base], name=name)
        AdapterAlias.objects.create(
            adapter=adapter, tenant=tenant, served_model=rows[base], name=name
        )
    registered_names = names_for(world.acme)
    for name in ("", "quill", "shelved", "tone", "quill:tone", "shared", "quill:shared"):
        assert unknown_name_warning(name, registered_names) == "", name
    for name in ("quil", "hidden", "theirs", "quill:theirs", "shelved:tone"):
        assert f"No model or adapter is called {name} today" in unknown_name_warning(
            name, registered_names
        ), name
    priced = priceable_names()
    for name in ("quill", "hidden", "shared", "quill:shared", "quill:tone#acme"):
        assert unknown_name_warning(name, priced) == "", name
    for name in ("tone", "quill:tone", "quill:tone#rival"):
        assert unknown_name_warning(name, priced), name


@database
def test_a_models_other_name_gets_neither_budget_nor_price(world: World) -> None:
    ServedModel.objects.create(name="quill", source="demo/model", public=True, aliases=["fast"])
    ServedModel.objects.create(name="hidden", source="there", public=False, aliases=["swift"])
    with pytest.raises(InvalidRequest, match="fast is another name of quill") as error:
        budget(world, model="fast", tokens=5)
    assert error.value.param == "model"
    with pytest.raises(InvalidRequest, match="swift is another name of hidden"):
        price(model="swift")
    # A tenant isn't told of models that it may not use.
    budget(world, model="swift", tokens=5)
    budget(world, model="quill", tokens=5)


def test_commands_warn_of_what_is_not_there(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    ServedModel.objects.create(name="quill", source="demo/model", public=True)
    for name, is_unknown in (("quil", True), ("quill", False)):
        for words in (
            ("set_budget", "--tenant", "acme", "--per", "day", "--tokens", "9", "--model", name),
            ("set_price", name, "--input", "1", "--output", "2"),
        ):
            call_command(*words)
            assert (f"is called {name} today" in capsys.readouterr().err) == is_unknown, words
