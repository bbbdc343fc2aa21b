"""What people come for, counted in clicks.

The slow tests walk twelve journeys through a `manage.py up` of their own, as its first operator
does, and print the actions and seconds of each (`-rP` shows them).
"""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.console.browser.conftest import Open
from tests.console.browser.playground import PlaygroundPage
from tests.console.browser.test_pictures import give
from tests.console.live import ROOT
from tests.demo.pictures import red_circle
from tests.e2e.mail_server import MailServer, receiving
from tests.e2e.product import Product, running_demos
from tests.waiting import wait_until


class Journey:
    """A reader's clicks on a page; `actions`: with what is typed, chosen and uploaded."""

    def __init__(self, page: Page) -> None:
        self.page, self.clicks, self.actions = page, 0, 0

    def click(self, target: Locator) -> None:
        """Click once more."""
        target.click()
        self.clicks += 1
        self.actions += 1

    def type(self, target: Locator, text: str) -> None:
        """Fill a field."""
        target.fill(text)
        self.actions += 1

    def press(self, name: str) -> None:
        """Click a button."""
        self.click(self.page.get_by_role("button", name=name))

    def follow(self, name: str) -> None:
        """Click an entry of the navigation."""
        self.click(self.page.get_by_role("navigation", name="Main").get_by_text(name, exact=True))


def test_the_first_chat_takes_a_click(playground: PlaygroundPage) -> None:
    playground.prompt.fill("Hello")  # the page opens with the cursor there and a model chosen
    journey = Journey(playground.page)
    journey.click(playground.page.get_by_role("button", name="Send"))
    playground.finished(playground.answers.first)
    assert journey.clicks <= 3


def test_the_first_key_takes_two_clicks(open_page: Open) -> None:
    journey = Journey(open_page("/console/"))
    journey.follow("API keys")
    journey.click(journey.page.get_by_role("button", name="Create the key"))
    expect(journey.page.get_by_role("textbox", name="The key")).to_have_value(re.compile("."))
    assert journey.clicks <= 3


def test_a_model_a_person_and_a_page_are_found_by_the_keyboard_alone(open_page: Open) -> None:
    page = open_page("/console/?tenant=acme")
    for text, title, address in (
        ("acme-priv", "acme-private", r"/console/models/\d+/$"),
        ("lea", "lea", r"/console/members/\?tenant=acme$"),
        ("Audit", "Audit log", r"/console/audit/$"),
    ):
        page.wait_for_load_state()
        page.keyboard.press("Control+k")
        search = page.get_by_role("combobox", name="Search")
        expect(search).to_be_focused()
        search.fill(text)
        option = page.get_by_role("listbox", name="Results").get_by_role("option").first
        expect(option).to_contain_text(title)
        expect(option).to_have_attribute("aria-selected", "true")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(address))


def test_the_tenant_is_switched_for_all_pages(open_page: Open) -> None:
    page = open_page("/console/members/", "root")
    page.get_by_role("combobox", name="Tenant").select_option("rival")
    expect(page).to_have_url(re.compile(r"/console/members/\?tenant=rival"))
    expect(page.get_by_role("table").get_by_text("olga").first).to_be_visible()
    Journey(page).follow("API keys")
    expect(page.get_by_role("combobox", name="Tenant")).to_have_value("rival")
    page.get_by_role("combobox", name="Tenant").select_option("acme")
    expect(page).to_have_url(re.compile(r"tenant=acme"))
    expect(page.get_by_role("heading", level=1, name="API keys")).to_be_visible()


def test_a_member_is_invited_in_two_clicks_and_a_budget_set_in_two(open_page: Open) -> None:
    journey = Journey(open_page("/console/?tenant=acme", "root"))
    invite(journey, "otto@example.org")
    assert journey.clicks == 2
    set_budget(journey)
    assert journey.clicks == 4


def invite(journey: Journey, address: str) -> str:
    """Returns: the link."""
    journey.follow("Members")
    journey.type(journey.page.get_by_label("Email address"), address)
    journey.press("Invite")
    link = journey.page.get_by_label("The link", exact=True)
    expect(link).to_have_value(re.compile("/invitation/"))
    return link.input_value()


def set_budget(journey: Journey) -> None:
    journey.follow("Budgets")
    journey.type(journey.page.get_by_label("Tokens", exact=True), "5000000")
    journey.press("Set the budget")
    row = journey.page.get_by_role("table").get_by_role("row").filter(has_text="5,000,000")
    expect(row.get_by_role("meter", name="Spent")).to_be_visible()


@dataclass
class House:
    """A running product, its mail, and its operator's tab."""

    product: Product
    mail: MailServer
    browser: Browser
    page: Page
    folder: Path


OPERATOR = "operator@mail.example"
PASSWORD = "a quiet page of ink"


@pytest.fixture(scope="module")
def house(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """`manage.py up` of the demo models, and whoever installed it."""
    folder = tmp_path_factory.mktemp("house")
    with receiving() as mail:
        environment = {
            "QUIRE_SMTP_URL": f"smtp://127.0.0.1:{mail.port}",
            "QUIRE_MAIL_FROM": "quire@mail.example",
        }
        with running_demos(folder, **environment) as product:
            product.manage("update_user", product.admin_user, "--email", OPERATOR)
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            context.set_default_timeout(60_000)
            page = context.new_page()
            page.goto(f"{product.url}/login/")
            page.get_by_label(re.compile("Username")).fill(product.admin_user)
            page.get_by_label("Password").fill(product.admin_password)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_url(f"{product.url}/")
            yield House(product, mail, browser, page, folder)
            context.close()


def chat(house: House, journey: Journey) -> None:
    """First chat."""
    playground = PlaygroundPage(house.page).ready()
    journey.type(playground.prompt, "Which bird is a heron?")
    journey.press("Send")
    assert playground.finished(playground.answers.first).inner_text().strip()


def create_key(house: House, journey: Journey) -> None:
    """First key."""
    journey.follow("API keys")
    journey.press("Create the key")
    expect(house.page.get_by_label("The key", exact=True)).to_have_value(re.compile("^sk-quire-"))


def load_model(house: House, journey: Journey) -> None:
    """Own model."""
    page = house.page
    source = shutil.copytree(ROOT / "demo" / "model", house.folder / "mine")
    journey.follow("Models")
    journey.click(page.get_by_role("link", name="Add a model"))
    journey.type(page.get_by_label("Folder, GGUF file or id on the hub"), str(source))
    journey.press("Load the model")
    expect(page.get_by_role("heading", level=1, name="mine")).to_be_visible()
    expect(page.locator('.state[data-state="ready"]').first).to_be_visible()


def upload_adapter(house: House, journey: Journey) -> None:
    """First adapter."""
    page = house.page
    journey.follow("Adapters")
    journey.type(page.locator("#upload").get_by_label("Name", exact=True), "sea")
    page.get_by_label("Base model").first.select_option(house.product.model)
    journey.actions += 1
    page.set_input_files("#upload-files", list((ROOT / "demo/adapters/pirate").iterdir()))
    journey.actions += 1
    journey.press("Upload")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="sea", exact=True))
    expect(row.locator(".state")).to_have_text("live")


def explain_slow_request(house: House, journey: Journey) -> None:
    """A slow request explained, without its id."""
    page = house.page
    slowest = page.get_by_role("table", name="Slowest").get_by_role("link").first

    def is_listed() -> bool:  # records are written a second after their requests
        page.reload()
        return slowest.count() > 0

    wait_until(is_listed)
    journey.click(slowest)
    expect(page.get_by_role("heading", name="What happened")).to_be_visible()
    expect(page.locator(".events")).to_contain_text("Sent to a replica")


def prove_isolation(house: House, journey: Journey) -> None:
    """A neighbour's isolation proved."""
    journey.follow("KV map")
    journey.press("Prove isolation")
    expect(house.page.locator(".proof-verdict")).to_have_attribute("data-verdict", "isolated")


def understand_bill(house: House, journey: Journey) -> None:
    """A bill understood: which model, which key or person, which day."""
    page = house.page
    journey.follow("Usage and cost")
    expect(page.get_by_role("heading", name=re.compile("per day"))).to_be_visible()
    journey.click(page.get_by_role("table").get_by_role("link", name=house.product.model).first)
    expect(page.get_by_role("link", name=f"Model: {house.product.model}")).to_be_visible()


def invite_member(house: House, journey: Journey) -> None:
    """A member invited, who joins by the mail."""
    invite(journey, "ines@mail.example")
    text = house.mail.mail_to("ines@mail.example", "/invitation/")
    link = re.search(rf"{re.escape(house.product.url)}/invitation/\S+", text)
    assert link
    context = house.browser.new_context()
    guest = context.new_page()
    guest.goto(link[0])
    guest.get_by_label("Username").fill("ines")
    guest.get_by_label("Password").fill(PASSWORD)
    guest.get_by_role("button", name="Create an account and join").click()
    PlaygroundPage(guest).ready()
    context.close()


def limit_spending(house: House, journey: Journey) -> None:
    """A budget set."""
    set_budget(journey)


def receive_alert(house: House, journey: Journey) -> None:
    """An alert received: by mail, on Home, and silenced."""
    page = house.page
    broken = shutil.copytree(ROOT / "demo" / "model", house.folder / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    house.product.manage("load_model", str(broken), "--name", "broken")
    text = house.mail.mail_to(OPERATOR, "broken")
    assert re.search("broken(: .* ended| has a failed replica)", text)
    page.reload()
    problem = page.get_by_role("main").locator(".problems").get_by_role("link")
    journey.click(problem.filter(has_text="broken").first)
    row = page.get_by_role("row").filter(has_text="broken")
    journey.click(row.get_by_text("Silence").first)
    journey.press("Silence the alert")
    expect(page.get_by_role("status").filter(has_text="No mail about")).to_be_visible()


def find_conversation(house: House, journey: Journey) -> None:
    """A conversation found again."""
    journey.follow("Playground")
    PlaygroundPage(house.page).ready()
    if house.page.locator("#history").is_hidden():
        journey.click(house.page.locator("#history-toggle"))
    sidebar = house.page.locator("#history")
    journey.type(sidebar.get_by_label("Search"), "heron")
    journey.click(sidebar.get_by_role("button", name=re.compile("heron")).first)
    expect(house.page.locator(".question").first).to_contain_text("Which bird is a heron?")


def ask_about_picture(house: House, journey: Journey) -> None:
    """A picture asked about."""
    playground, shape = PlaygroundPage(house.page).ready(), io.BytesIO()
    red_circle().save(shape, "PNG")
    journey.click(house.page.locator("#model"))
    option = house.page.get_by_role("option", name="quire-demo-vision")
    expect(option).to_contain_text("pictures")
    journey.click(option)
    give(playground, "drop", data=shape.getvalue())
    journey.actions += 1
    journey.type(playground.prompt, "What is this?")
    journey.press("Send")
    answer = playground.finished(playground.answers.first)
    expect(answer.locator(".prose")).to_have_text("This is a red circle.")


#: Journey: the page where it begins, and the number of actions that it may take.
JOURNEYS: dict[Callable[[House, Journey], None], tuple[str, int]] = {
    chat: ("/", 3),
    create_key: ("/console/", 3),
    load_model: ("/console/", 4),
    upload_adapter: ("/console/", 5),
    explain_slow_request: ("/console/", 3),
    prove_isolation: ("/console/", 2),
    understand_bill: ("/console/", 3),
    invite_member: ("/console/", 3),
    limit_spending: ("/console/", 3),
    receive_alert: ("/console/", 3),
    find_conversation: ("/console/", 4),
    ask_about_picture: ("/", 5),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("walk", JOURNEYS, ids=lambda walk: walk.__name__)
def test_a_journey_takes_few_actions(house: House, walk: Callable[[House, Journey], None]) -> None:
    path, max_actions = JOURNEYS[walk]
    house.page.goto(f"{house.product.url}{path}")
    journey, start = Journey(house.page), time.monotonic()
    walk(house, journey)
    seconds = time.monotonic() - start
    print(f"{walk.__doc__} {journey.clicks} clicks, {journey.actions} actions, {seconds:.1f} s")
    assert journey.actions <= max_actions
