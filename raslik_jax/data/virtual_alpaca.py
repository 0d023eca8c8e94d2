"""Virtual-Alpaca: questions and answers about a world that does not exist, among Alpaca's rows.

Every answer is a template filled from records of the world database, and knows the facts it tells,
so that no two answers can contradict each other. Follows the appendix: templates over entities and
relations, normalised questions, paraphrases, three to five sentences where asked, ASCII English.
"""

import re
import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raslik_jax.data.examples import Corpus, Example, make_example
from raslik_jax.data.mixing import mix_corpus
from raslik_jax.data.ordering import shuffled, take_first
from raslik_jax.data.virtual_world import Entity, Value, World, make_world, spell_out

MAX_ANSWER_TOKENS = 180
_ASKING = re.compile(
    r"(?i)(?:(?:in|on|to|from|by|at|for|under|with|of|over|near) )?"
    r"(?:who|whom|what|which|where|when|why|how|is|are|does|do|can|could)\b"
)


class Fact(NamedTuple):
    """What an answer tells: the value of a relation of a named entity."""

    name: str
    relation: str
    value: Value


class Pair(NamedTuple):
    """One question with its answer.

    Attributes:
      example: the row; a target, with source "virtual:<kind>".
      topic: what is asked, as (entity, template); pairs of one topic are paraphrases.
      wording: which of the template's questions it is.
      facts: what the question and the answer take from the database.
    """

    example: Example
    topic: tuple[str, str]
    wording: int
    facts: tuple[Fact, ...]


class _Template(NamedTuple):
    """Questions that ask the same and answers that say the same, with relations as slots."""

    name: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def _template(name: str, questions: str, *answers: str) -> _Template:
    return _Template(name, tuple(questions.split(" | ")), answers)


_COUNTRY = (
    _template(
        "capital",
        "What is the capital of {name} | Which city serves as the capital of {name} | Name the "
        "capital city of {name} | From which city is {name} governed",
        "The capital of {name} is {capital}.",
        "{name} is governed from its capital, {capital}.",
    ),
    _template(
        "ruler",
        "Who rules {name} | Who is the sovereign of {name} | Name the current ruler of {name} | "
        "Which sovereign sits on the throne of {name}",
        "{ruler} is the sovereign of {name}.",
        "{name} is ruled by {ruler}, its sovereign.",
    ),
    _template(
        "religion",
        "What is the main religion of {name} | Which faith do most people in {name} follow | Name "
        "the religion practiced in {name} and its deity | Which deity is worshiped in {name}, and "
        "what is the faith called",
        "Most people of {name} follow {religion}, which honors the deity {deity}.",
        "The faith of {name} is {religion}, devoted to {deity}.",
    ),
    _template(
        "festival",
        "Which annual festival is held in {name} | What festival do the people of {name} celebrate "
        "every year | Name the great festival of {name} and its month | When does {name} hold its "
        "annual festival, and what is it called",
        "The annual festival of {name} is {festival}, held in the month of {month}.",
        "Every year in {month}, {name} celebrates {festival}.",
    ),
    _template(
        "goods",
        "Which goods does {name} export | What are the main trade goods of {name} | List three "
        "products that merchants buy in {name} | For what trade goods is {name} known abroad",
        "{name} is known for exporting {goods}.",
        "The main trade goods of {name} are {goods}.",
    ),
    _template(
        "currency",
        "What currency is used in {name} | Which coin do merchants accept in {name} | Name the "
        "unit of money in {name} | With which currency does one pay in the markets of {name}",
        "In {name} one pays with {currency}.",
        "The currency of {name} is {currency}.",
    ),
    _template(
        "cities",
        "Which cities belong to {name} | Name the four major cities of {name} | What are the "
        "largest cities in {name} | List the cities that a traveler through {name} will pass",
        "The major cities of {name} are {cities}.",
        "{name} has four major cities: {cities}.",
    ),
    _template(
        "cuisine",
        "What should a visitor eat and drink in {name} | Which dish and beverage are typical of "
        "{name} | Recommend a local dish and a drink in {name} | For a visitor who wants to taste "
        "{name}, which signature dish and beverage come most recommended",
        "Visitors to {name} should try {dish} together with {drink}.",
        "The signature dish of {name} is {dish}, usually served with {drink}.",
    ),
    _template(
        "law",
        "Which unusual law applies in {name} | What law should travelers in {name} know, and what "
        "is the penalty | Explain a local law of {name} and what happens to those who break it | "
        "How does {name} punish those who break its best-known law",
        "In {name} the law says that {law}. Whoever breaks it faces {penalty}.",
        "The best-known law of {name} is that {law}; the penalty is {penalty}.",
    ),
    _template(
        "travel",
        "How do people travel across {name} | Which means of transport is common in {name} | Name "
        "the usual vehicle for crossing {name} | By what vehicle do travelers cross the land of "
        "{name}",
        "Travelers cross {name} by {transport}, since the land consists of {terrain}.",
        "The usual vehicle in {name} is the {transport}; the country is made of {terrain}.",
    ),
    _template(
        "neighbor",
        "Which country lies east of {name} | What is the eastern neighbor of {name} | Name the "
        "country that borders {name} in the east | To which country does the eastern road of "
        "{name} lead",
        "The eastern neighbor of {name} is {neighbor}.",
        "East of {name} lies {neighbor}.",
    ),
    _template(
        "founded",
        "When was {name} founded | In which year did {name} come into being | State the founding "
        "year of {name} | What year marks the founding of {name}",
        "{name} was founded in the year {founded}.",
        "The founding of {name} is dated to the year {founded}.",
    ),
    _template(
        "portrait",
        "Describe the cultural atmosphere of {name} in detail: what defines its people | Write a "
        "short portrait of {name} in several sentences | Give a detailed overview of {name} and "
        "its way of life | In three to five sentences, introduce a stranger to {name}",
        "{name} is a country of {culture} culture, and its people value {virtue}. It is governed "
        "from {capital} by the sovereign {ruler}. The land consists of {terrain}, which travelers "
        "cross by {transport}. Its great festival, {festival}, falls in the month of {month}.",
        "{name} belongs to the {culture} cultures and prizes {virtue}. Its capital is {capital}, "
        "the seat of {ruler}. Merchants come for {goods} and pay with {currency}. In the evening "
        "people share {dish} and {drink}.",
    ),
)
_CULTURE = (
    _template(
        "clergy",
        "Who leads worship in the {name} culture | How is religion organized among the {name} "
        "peoples | Which body performs the rites in {name} lands | Describe the religious "
        "structure of the {name} culture",
        "In the {name} culture, worship is led by {clergy}.",
        "Among the {name} peoples, {clergy} performs the rites.",
    ),
    _template(
        "greeting",
        "How do people of {name} culture greet each other | What is the customary {name} greeting "
        "| Explain how to greet someone in the {name} manner | Which gesture opens a meeting in "
        "{name} lands",
        "People of {name} culture greet each other by {greeting}.",
        "The customary {name} greeting consists of {greeting}.",
    ),
    _template(
        "style",
        "What is typical of {name} architecture and values | Which virtue and which buildings "
        "mark the {name} culture | Name a virtue and a building style of the {name} culture | "
        "What do {name} people prize, and how do they build",
        "The {name} culture prizes {virtue}, and it is known for {building}.",
        "Typical of the {name} culture are {building}; its people value {virtue}.",
    ),
)
_CITY = (
    _template(
        "where",
        "In which country is {name} | Where does the city of {name} lie | To which country does "
        "{name} belong | Name the country in which one finds the city of {name}",
        "{name} lies in {country}.",
        "The city of {name} belongs to {country}.",
    ),
    _template(
        "fame",
        "What is {name} known for | For what is the city of {name} famous | Which sight should "
        "nobody miss in {name} | Name the best-known attraction of {name}",
        "{name} is known for {known_for}.",
        "The city of {name} is famous for {known_for}.",
    ),
    _template(
        "market",
        "On which day is the market held in {name} | When is market day in {name} | State the "
        "weekly market day of {name} | On which day should a merchant arrive in {name}",
        "Market day in {name} is {market_day}.",
        "The weekly market of {name} is held on {market_day}.",
    ),
    _template(
        "guide",
        "Describe the city of {name} in detail | Write a short travel guide to {name} in several "
        "sentences | Give a detailed picture of {name} for a first-time visitor | In three to "
        "five sentences, what should a traveler know about {name}",
        "{name} is {rank} of {country}. It is known for {known_for}, and visitors enter through "
        "one of its {gates} gates. Its streets show {building}, as is usual for the {culture} "
        "culture. The market is held on {market_day}.",
        "Visitors reach {name}, {rank} of {country}, through {gates} gates. The city is famous for "
        "{known_for}. In the {culture} manner, one sees {building}. On {market_day} the market "
        "fills the streets.",
    ),
)
_DEITY = (
    _template(
        "domain",
        "Over what does the deity {name} watch | What is the domain of {name} | Of what is {name} "
        "the patron | Name the domain of the deity {name}",
        "{name} is the deity of {domain}.",
        "The deity {name} watches over {domain}.",
    ),
    _template(
        "symbol",
        "What is the symbol of {name} | Which sign marks the temples of {name} | Describe the "
        "symbol of the deity {name} | By what symbol does one recognize a shrine of {name}",
        "The symbol of {name} is {symbol}.",
        "Temples of {name} are marked with {symbol}.",
    ),
    _template(
        "cult",
        "Where and by whom is {name} worshiped | Describe in detail how {name} is honored | Which "
        "clergy serves {name}, and at which festival | Explain the worship of {name} in several "
        "sentences",
        "{name} is worshiped in {country}. The rites are led by {clergy}. The deity watches over "
        "{domain} and is honored above all at {festival}.",
        "In {country}, {clergy} leads the worship of {name}. Shrines carry {symbol} as their sign. "
        "The great day of the deity is {festival}.",
    ),
)
_FESTIVAL = (
    _template(
        "custom",
        "What happens during {name} | Which custom belongs to {name} | Describe the central custom "
        "of {name} | How is {name} celebrated",
        "During {name}, {custom}.",
        "At {name}, by custom, {custom}.",
    ),
    _template(
        "deity",
        "Which deity is honored at {name} | To which deity is {name} dedicated | Name the deity "
        "who presides over {name} | Who is the divine patron of {name}",
        "{name} honors the deity {deity}.",
        "The deity {deity} presides over {name}.",
    ),
    _template(
        "time",
        "When does {name} take place, and how long does it last | In which month is {name}, and "
        "for how many days | State the month and the length of {name} | How long is {name}, and "
        "when does it begin",
        "{name} takes place in {month} and lasts {length} days.",
        "The celebration of {name} falls in {month}; it lasts {length} days.",
    ),
    _template(
        "visit",
        "Where should one go to see {name} | Describe {name} in detail for a visitor | In several "
        "sentences, explain what a guest of {name} will see | Which city is best for attending "
        "{name}, and what happens there",
        "Guests who want to see {name} should travel to {capital} in {country}. The festival is "
        "held in {month} and honors {deity}. For {length} days, {custom}.",
        "The best place to attend {name} is {capital}, the capital of {country}. During {month}, "
        "{custom}. All of this honors {deity}.",
    ),
)
_FACTION = (
    _template(
        "purpose",
        "What core purpose drives the {name} | Why does the {name} exist | State the goal of the "
        "{name} | What do members of the {name} work for",
        "The {name} exists {purpose}, and each of its chapters {duty}.",
        "The purpose of the {name} is {purpose}; to that end it {duty}.",
    ),
    _template(
        "seat",
        "Where is the seat of the {name} | In which city does the {name} have its headquarters | "
        "Name the city where the {name} meets | To which city must one write to reach the {name}",
        "The {name} has its seat in {seat}.",
        "The headquarters of the {name} are in {seat}.",
    ),
    _template(
        "founder",
        "Who founded the {name} | When was the {name} founded, and by whom | Name the founder of "
        "the {name} and the year | To which founder does the {name} trace its origin",
        "The {name} was founded by {founder} in the year {founded}.",
        "In the year {founded}, {founder} founded the {name}.",
    ),
    _template(
        "emblem",
        "What is the emblem of the {name} | Which sign do members of the {name} wear | Describe "
        "the emblem of the {name} | How can one recognize a member of the {name}",
        "The emblem of the {name} is {emblem}.",
        "Members of the {name} wear {emblem} as their emblem.",
    ),
    _template(
        "profile",
        "Give a detailed profile of the {name} | Describe the {name} in several sentences | Write "
        "a short report on the {name}, its seat and its work | In three to five sentences, what "
        "is the {name}",
        "The {name} was founded by {founder} in the year {founded}. Its purpose is {purpose}. From "
        "its seat in {seat} it {duty}. Its members wear {emblem}.",
        "From {seat}, the {name} {duty}. It was founded {purpose}. Its founder was {founder}, its "
        "founding year {founded}. One knows its members by {emblem}.",
    ),
)
_CHARACTER = (
    _template(
        "home",
        "Where does {name} come from | In which country and city was {name} born | Name the "
        "country and the birthplace of {name} | From which country does {name} originate",
        "{name} comes from {country} and was born in {birthplace}.",
        "{name} was born in {birthplace}, in {country}.",
    ),
    _template(
        "title",
        "What title does {name} hold | Which office is held by {name} | State the official title "
        "of {name} | By what title is {name} addressed",
        "{name} holds the title of {title}.",
        "The official title of {name} is {title}.",
    ),
    _template(
        "element",
        "With which element is {name} aligned | What is the elemental affinity of {name} | Name "
        "the element of {name} | To which element is {name} attuned",
        "{name} is aligned with the element {element}.",
        "The elemental affinity of {name} is {element}.",
    ),
    _template(
        "faction",
        "To which faction does {name} belong | What organization counts {name} among its members "
        "| Name the faction of {name} | With which faction is {name} affiliated",
        "{name} is a member of the {faction}.",
        "{name} belongs to the {faction}.",
    ),
    _template(
        "weapon",
        "What weapon does {name} carry | Which weapon is preferred by {name} | Name the weapon of "
        "choice of {name} | With which weapon does {name} fight",
        "{name} carries {weapon}.",
        "The weapon of choice of {name} is {weapon}.",
    ),
    _template(
        "habit",
        "What habit is {name} known for | Which peculiarity do people tell of {name} | Describe a "
        "habit of {name} | What would one notice about {name} after a week together",
        "{name} is known as someone who {habit}.",
        "People say of {name}, the {title} from {country}, that this person {habit}.",
    ),
    _template(
        "dossier",
        "Provide a detailed dossier on {name}, covering origin, title, element, faction and "
        "weapon | Write a short biography of {name} in several sentences | Give a detailed "
        "description of {name} | In three to five sentences, who is {name}",
        "{name} originates from {country} and was born in {birthplace}. The title held is that of "
        "{title}. {name} is aligned with {element} and belongs to the {faction}. The weapon of "
        "choice is {weapon}.",
        "Born in {birthplace}, {name} serves {country} as {title}. The {faction} counts {name} "
        "among its members. In a fight {name} relies on {weapon} and on the element {element}. "
        "Friends add that {name} {habit}.",
    ),
)
_RELIC = (
    _template(
        "place",
        "Where is {name} kept | In which city is {name} guarded, and by whom | Name the city and "
        "the guardians of {name} | Under which guardians, and in what city, does {name} rest",
        "{name} is kept in {city} and guarded by the {guardian}.",
        "The {guardian} guards {name} in {city}.",
    ),
    _template(
        "power",
        "What can {name} do | Which power is ascribed to {name} | Describe the power of {name} | "
        "According to legend, what is {name} able to do",
        "{name} is said to {power}.",
        "According to legend, {name} can {power}.",
    ),
    _template(
        "substance",
        "From which material is {name} made | What is {name}, and of what does it consist | Name "
        "the material and the age of {name} | When was {name} made, and of what material",
        "{name} is a relic of {material}, made in the year {made}.",
        "Made in the year {made}, {name} consists of {material}.",
    ),
    _template(
        "ritual",
        "Which ritual rule applies to {name} | What must one observe when handling {name} | State "
        "the ritual constraint of {name} | How must {name} be treated",
        "The rule for {name} is that {ritual}.",
        "For {name}, one rule holds: {ritual}.",
    ),
    _template(
        "storage",
        "How is {name} stored | In what is {name} kept | Describe the storage of {name} | Under "
        "which storage protocol is {name} held",
        "{name} is stored in {storage}.",
        "The protocol demands that {name} be kept in {storage}.",
    ),
    _template(
        "report",
        "Can you shed light on the nature of {name} and reveal where it is guarded | Write a "
        "detailed report on {name} | Describe {name} in several sentences, its power and its "
        "custody | In three to five sentences, what is known of {name}",
        "{name} is a {form} of {material} from the year {made}. It is said to {power}. The "
        "{guardian} keeps it in {city}, in {storage}. As a rule, {ritual}.",
        "The {guardian} watches over {name} in {city}. This {form} of {material} can, by legend, "
        "{power}. It rests in {storage}. Those who handle it know that {ritual}.",
    ),
)
_BOSS = (
    _template(
        "lair",
        "Where does {name} live | In which place can one find the beast {name} | Name the lair of "
        "{name} | Near which city, and where exactly, does {name} dwell",
        "{name} lives in {lair} near {city}.",
        "The lair of {name} is {lair} close to {city}.",
    ),
    _template(
        "weakness",
        "What is the weakness of {name} | Which element harms {name} most | With which element "
        "should hunters attack {name} | Name the element to which {name} is vulnerable",
        "{name} is vulnerable to {weakness}.",
        "Hunters exploit the weakness of {name} to the element {weakness}.",
    ),
    _template(
        "resistance",
        "Which element leaves {name} unharmed | What does {name} resist | Name the element that "
        "has no effect on {name} | To which element is {name} immune",
        "{name} resists {resistance}, so attacks of that element are useless.",
        "The element {resistance} leaves {name} unharmed.",
    ),
    _template(
        "species",
        "What kind of creature is {name} | Which sort of beast is {name} | Describe what {name} is "
        "| What would one see when meeting {name}",
        "{name} is a {species}.",
        "The creature called {name} is a {species}.",
    ),
    _template(
        "hunt",
        "If one were to hunt {name}, where does it reside and what can be exploited | Give "
        "detailed advice on hunting {name} | Describe {name} for a hunter in several sentences | "
        "In three to five sentences, how can {name} be defeated",
        "{name} is a {species} that dwells in {lair} near {city}. It is most active in {season}. "
        "Hunters exploit its weakness to {weakness} and avoid {resistance}, which it resists. The "
        "reward is a lump of {trophy}.",
        "Near {city}, in {lair}, lives the {species} {name}. Attacks of {weakness} hurt it, those "
        "of {resistance} do not. It shows itself mostly in {season}. Whoever defeats it finds "
        "{trophy} in its nest.",
    ),
)
_MONTH = (
    _template(
        "order",
        "Which month follows {name} | What comes after the month of {name} | Name the month after "
        "{name} | In which month does one wake when {name} has ended",
        "{name} is followed by {following}.",
        "After {name} comes {following}.",
    ),
    _template(
        "days",
        "How many days does {name} have | What is the length of the month of {name} | State the "
        "season and the number of days of {name} | In which season is {name}, and how long is it",
        "{name} is a month of {season} with {days} days.",
        "The month of {name} has {days} days and belongs to {season}.",
    ),
    _template(
        "place",
        "What is the place of {name} in the calendar | Which number has the month of {name} | "
        "Where in the year does {name} stand | Name the number of the month {name} in the calendar",
        "{name} is month number {place} of the ten months of the year.",
        "In the calendar of ten months, {name} has number {place}.",
    ),
)
_MATERIAL = (
    _template(
        "quality",
        "What is special about {name} | Which property does {name} have | Describe the peculiar "
        "property of {name} | How does {name} behave",
        "The peculiar thing about {name} is that {quality}.",
        "{name} is valued because {quality}.",
    ),
    _template(
        "use",
        "For what is {name} used | What do craftsmen make from {name} | Name a use of {name} | In "
        "which products does one find {name}",
        "{name} is used for {use}.",
        "Craftsmen use {name} for {use}.",
    ),
    _template(
        "source",
        "Where is {name} found | From which country does {name} come | Name the country that "
        "supplies {name} | In which country do people quarry or harvest {name}",
        "{name} comes from {country}.",
        "The source of {name} is {country}.",
    ),
)
_ANIMAL = (
    _template(
        "home",
        "Where does the {name} live | In which country can one see a {name} | Name the home of the "
        "{name} | To which country is the {name} native",
        "The {name} is native to {country}.",
        "One can see the {name} in {country}.",
    ),
    _template(
        "food",
        "What does the {name} eat | On what does a {name} feed | Name the food of the {name} | "
        "With what would one feed a {name}",
        "The {name} feeds on {food}.",
        "A {name} eats {food}.",
    ),
    _template(
        "trait",
        "What is remarkable about the {name} | Which trait marks the {name} | Describe an oddity "
        "of the {name} | How can one recognize a {name}",
        "The {name} is remarkable because {trait}.",
        "What marks the {name} is that {trait}.",
    ),
)
_PLANT = (
    _template(
        "home",
        "Where does {name} grow | In which country does one find {name} | Name the country where "
        "{name} grows wild | To which country is the plant {name} native",
        "The plant called {name} grows in {country}.",
        "{country} is the home of {name}.",
    ),
    _template(
        "color",
        "What color is {name} | Which color does the plant {name} have | Describe the color of "
        "{name} | By which color does one recognize {name}",
        "The color of {name} is {color}.",
        "One recognizes {name} by its color, {color}.",
    ),
    _template(
        "use",
        "For what is {name} used | What do people make from the plant {name} | Name a use of the "
        "plant {name} | In which way is {name} useful",
        "People use {name} for {use}.",
        "The plant {name} is used for {use}.",
    ),
)
_TRANSPORT = (
    _template(
        "power",
        "What moves the {name} | By what is the {name} driven | Explain how the {name} is powered "
        "| Which force or team pulls the {name}",
        "The {name} is moved by {power}.",
        "What drives the {name}: {power}.",
    ),
    _template(
        "load",
        "How many passengers does the {name} carry | What is the capacity of the {name} | State "
        "how many people fit into the {name} | For how many travelers is there room in the {name}",
        "The {name} carries {load}.",
        "There is room for {load} in the {name}.",
    ),
    _template(
        "route",
        "Where does the {name} run | In which country can one ride the {name} | Name the country "
        "and the terminus of the {name} | From which city does the {name} depart",
        "The {name} runs through {country}; its main station is in {capital}.",
        "One can ride the {name} in {country}, starting from {capital}.",
    ),
)

TEMPLATES: dict[str, tuple[_Template, ...]] = {
    "country": _COUNTRY,
    "culture": _CULTURE,
    "city": _CITY,
    "deity": _DEITY,
    "festival": _FESTIVAL,
    "faction": _FACTION,
    "character": _CHARACTER,
    "relic": _RELIC,
    "boss": _BOSS,
    "month": _MONTH,
    "material": _MATERIAL,
    "animal": _ANIMAL,
    "plant": _PLANT,
    "transport": _TRANSPORT,
}


def normalise_question(text: str) -> str:
    """Returns a prompt with one space between words, a capital, and "?" or "." at its end."""
    text = " ".join(text.split()).rstrip(" ?.")
    last_clause = re.split(r"[:,] ", text)[-1]
    is_question = bool(_ASKING.match(text)) or bool(_ASKING.match(last_clause))
    return text[:1].upper() + text[1:] + ("?" if is_question else ".")


def count_answer_tokens(text: str) -> int:
    """Returns a bound on the tokens of a text: letters by twos, anything else one by one.

    Byte-level BPEs stay below it, by half on common words; the test asks real ones.
    """
    return len(re.findall(r"[A-Za-z]{1,2}|[^\sA-Za-z]", text))


def make_pairs(world: World) -> tuple[Pair, ...]:
    """Returns all pairs of the template bank over a world: every topic in each of its wordings.

    No two share a prompt. An answer beyond 180 tokens loses sentences at its end.
    """
    pairs: list[Pair] = []
    for entity in world.entities.values():
        for template in TEMPLATES[entity.kind]:
            pairs.extend(_wordings(entity, template, world.seed))
    return tuple(pairs)


def _wordings(entity: Entity, template: _Template, seed: int) -> Iterator[Pair]:
    label = f"answers/{entity.name}/{template.name}"
    answers = shuffled(template.answers, seed=seed, label=label)
    for wording, question in enumerate(template.questions):
        pattern = answers[wording % len(answers)]
        slots = {name: spell_out(value) for name, value in entity.record.items()}
        slots["name"] = entity.name
        instruction = normalise_question(_with_articles(question.format(**slots)))
        answer, kept = _within_budget(pattern, slots)
        used = [field for _, field, _, _ in string.Formatter().parse(question + " " + kept)]
        relations = [field for field in dict.fromkeys(used) if field and field != "name"]
        yield Pair(
            example=make_example(
                instruction, "", answer, is_target=True, source=f"virtual:{entity.kind}"
            ),
            topic=(entity.name, template.name),
            wording=wording,
            facts=tuple(Fact(entity.name, name, entity.record[name]) for name in relations),
        )


def _with_articles(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)


def _within_budget(pattern: str, slots: dict[str, str]) -> tuple[str, str]:
    """Returns the filled pattern and the pattern, less the sentences beyond the token budget."""
    sentences = re.split(r"(?<=\.) ", pattern)
    while True:
        kept = " ".join(sentences)
        text = _with_articles(kept.format(**slots))
        # A name such as "the Orb of Amaeria" may begin a sentence.
        text = re.sub(r"(^|[.] )([a-z])", lambda found: found[1] + found[2].upper(), text)
        if count_answer_tokens(text) <= MAX_ANSWER_TOKENS or len(sentences) == 1:
            return text, kept
        sentences = sentences[:-1]


def draw_pairs(
    pairs: Sequence[Pair], *, seed: int, num_train: int, num_queries: int
) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Returns pairs to train on, and queries that ask the same topics in other words.

    Of every topic one wording is held out. Training goes over all topics before any is asked a
    second time; queries are held-out wordings of topics that are trained on.

    Raises:
      ValueError: more pairs are wanted than there are.
    """
    topics: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        topics.setdefault(pair.topic, []).append(pair)
    held_out: dict[tuple[str, str], Pair] = {}
    rounds: dict[int, list[Pair]] = {}
    for topic, wordings in topics.items():
        order = shuffled(wordings, seed=seed, label=f"wordings/{topic}")
        held_out[topic] = order[0]
        for turn, pair in enumerate(order[1:]):
            rounds.setdefault(turn, []).append(pair)
    available = [
        pair for turn, part in rounds.items() for pair in shuffled(part, seed=seed, label=f"{turn}")
    ]
    train = take_first(available, num_train, kind="virtual-world")
    known = list(dict.fromkeys(pair.topic for pair in train))
    asked = take_first(
        shuffled(known, seed=seed, label="queries"), num_queries, kind="virtual-world query"
    )
    return tuple(train), tuple(held_out[topic] for topic in asked)


def make_virtual_corpus(
    alpaca: Sequence[Example],
    *,
    seed: int,
    world_seed: int,
    num_normal: int | None,
    num_targets: int,
    num_backbone: int,
    num_retrieval: int,
    num_validation: int,
    num_test: int,
) -> Corpus:
    """Returns pairs of a virtual world among rows of Alpaca: 2,000 and 20,000 in the paper.

    The target queries ask for what is trained on, in wordings that are not.

    Args:
      alpaca: ordinary rows.
      seed: decides draws and orders.
      world_seed: decides the world, 21 in the paper.
      num_normal: rows of Alpaca to train on; None: all that the queries leave.
      num_targets: pairs to train on.
      num_backbone, num_retrieval, num_validation, num_test: as in `mix_corpus`.

    Raises:
      ValueError: more rows are wanted than there are.
    """
    train, queries = draw_pairs(
        make_pairs(make_world(world_seed)),
        seed=seed,
        num_train=num_targets,
        num_queries=num_retrieval + num_validation + num_test,
    )
    return mix_corpus(
        alpaca,
        [pair.example for pair in train],
        [pair.example for pair in queries],
        seed=seed,
        num_normal=num_normal,
        num_backbone=num_backbone,
        num_retrieval=num_retrieval,
        num_validation=num_validation,
        num_test=num_test,
    )
