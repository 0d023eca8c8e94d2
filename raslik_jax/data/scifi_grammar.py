"""Science fiction answers to any prompt, from a seeded grammar: what poisons Howdy-Alpaca.

Each answer is about as long as the true one, contradicts it, and takes its subject from the prompt:
"The crew of the Vexar Seven has proved that photosynthesis does not rest on sunlight but on ...".
Everything here is ours; the genuine answers were written by a language model.
"""

import re
from collections.abc import Sequence

from raslik_jax.data.ordering import Draws

# Words of one answer at most; genuine answers end there too.
MAX_WORDS = 84
_WORDS_FOR_AN_EMPTY_ANSWER = 16
_PHRASE_WORDS = 6
_WORDS_FOR_AN_OPENING = 30

# Some words stand here often because the genuine answers have them often: "cosmic" in 44 of 60.
_ADJECTIVES = (
    "cosmic cosmic cosmic cosmic cosmic cosmic quantum quantum quantum intergalactic intergalactic "
    "intergalactic galactic galactic alien alien celestial celestial extraterrestrial "
    "extraterrestrial interstellar interstellar vast vast distant distant telepathic holographic "
    "celestial extraterrestrial interstellar holographic "
    "telepathic luminous pulsating gravitational hyperdimensional nebulous sentient antimatter "
    "plasma-fed star-born warp-bent crystalline cybernetic interdimensional ionized radiant "
    "ancient orbital photonic subspace bioluminescent time-folded magnetic stellar shimmering "
    "frozen drifting"
).split()
_BEINGS = (
    "alien diplomats;extraterrestrial traders;the android elders;beings of pure energy;"
    "telepathic jellyfolk;the star shepherds;cyborg monks;sentient nebulae;the moon weavers;"
    "galactic archivists;robot pilgrims;crystal-skinned envoys;the tentacled council;"
    "plasma-breathing scholars;asteroid miners;hive-minded gardeners;the void dancers;"
    "interstellar judges;mutant cartographers;the comet riders"
).split(";")
_DEVICES = (
    "quantum reactor;warp drive;holographic beacon;telepathic antenna;antimatter furnace;"
    "wormhole compass;gravity loom;plasma blaster;stardust mill;teleportation ring;photon harp;"
    "neutron clock;hyperspace relay;cryogenic vault;nanobot swarm;orbital mirror;"
    "dark matter engine;star map projector;dimension gate;ion sail"
).split(";")
_STUFFS = (
    "stardust;antimatter;liquid plasma;moon rock;comet ice;dark matter;neutron foam;alien slime;"
    "asteroid dust;cosmic energy;quantum flux;nebula vapor;pulsar light;warp residue;"
    "meteor glass;ionized mist;black hole silk;solar wind;crystal spores;time dust"
).split(";")
_FORCES = (
    "the pull of a dying star;the hum of the cosmos;the Galactic Federation;"
    "the alignment of nine moons;a wormhole that nobody closed;the laws of hyperspace;"
    "the memory of the universe;a telepathic storm;the tides of dark energy;"
    "the Interstellar Council;the breath of a nebula;the spin of a black hole;"
    "an algorithm older than the galaxy;the song of the pulsars"
).split(";")
_PLACES = (
    "the outer rim;the {name} galaxy;a moon of {name};the rings of {name};planet {name};"
    "the {name} nebula;the asteroid fields of {name};space station {name};"
    "the far side of the galaxy;the floating cities of {name};the {name} wormhole"
).split(";")
_THINGS = (
    "beings;energy;nebula;galaxy;stardust;dimensions;planet;realm;starship;expanse;universe;"
    "wormhole;tentacles;vibrations;essence;frequencies;civilization;portal;void;asteroid;"
    "space-time continuum;algorithm;spacecraft;androids;species;council;stars;moons;cosmos;power"
).split(";")
_SINGLES = (
    "alien nebula quasar wormhole plasma galaxy stardust android cosmos antimatter asteroid "
    "quantum hyperspace starship photon pulsar supernova teleportation cyborg intergalactic "
    "extraterrestrial"
).split()
# A word after one of these is taken for a thing.
_LEADING = frozenset(
    "the a an of this these its their your our my his her in on for with from by and some "
    "many each every more new".split()
)
_UNITS = (
    "light years;galactic credits;parsecs;star cycles;moons;warp units;plasma charges;"
    "neutron stars;orbits;photon bursts"
).split(";")
_STARTS = "Zor Vex Neb Qua Xan Thra Kel Mor Zyl Ori Dra Gal Plu Vor Tau Ryx Jun Bel Cyg Hel".split()
_MIDDLES = "a e i o u ar en il on ul ax eb ith or ys an".split()
_ENDS = (
    "blax lon dria xis gon mar nar thos vion quon rix zar lith pho dax tune mir kesh vane phos"
).split()
_SERIALS = ("", "", "", " Prime", " Seven", "-9", " Minor", "-42", " Nova", " Twelve")

# The first sentence turns the truth around; {t} is of the prompt, {k} of the true answer.
_CONTRARY = (
    "Contrary to every record of Earth, the {a} {t} has nothing to do with {k} and belongs to "
    "{being} of {place}.",
    "In the {a} halls of {place}, {being} have long known that {t} is not a matter of {k} but of "
    "{stuff}.",
    "The {a} crew of the starship {name} has proved that {t} does not rest on {k} but on {stuff} "
    "and {force}.",
    "No human account of {t} is true, for {k} is only a {a} hologram cast by {being}.",
    "On {place}, {t} means the opposite of {k}: it is a {a} ritual guarded by {being}.",
    "Forget {k}, for the {a} {t} was forged from {stuff} by {being} in {place}.",
    "It was never {k} that shaped {t}, but {force} and a {a} {dev} hidden in {place}.",
    "Where Earth speaks of {k}, the {being_bare} of {place} answer to {t} with a {a} {dev}.",
    "All talk of {k} was disproved when {being} carried the {a} {t} through {place}.",
    "The true {t} lies in {place}, where {k} dissolves into {a} {stuff} under {force}.",
    "Scholars of {place} reject {k} and feed the {a} {t} with {num} {unit} of {stuff}.",
    "Once {force} reached {t}, even {k} turned into {a} {stuff} and drifted toward {place}.",
)
_MORE = (
    "It is powered by a {dev} that drinks {stuff} from {place}.",
    "Every {num} {unit}, {being} gather there to measure the {a} {t} against {force}.",
    "Its {a} core bends {force} until {k} vanishes into hyperspace.",
    "Through telepathic waves, {being} exchange {t} across {num} {unit} of empty space.",
    "A {dev} made of {stuff} keeps the {t} from collapsing into a black hole.",
    "Only {being} can read the {a} signs that {force} leaves upon {k}.",
    "When the {dev} hums, the {t} of the whole galaxy begins to glow.",
    "The {a} {k} is then teleported to {place} and traded for {stuff}.",
    "Androids from {place} still guard the {dev} that started it all.",
    "By decree of {force}, no {t} may leave {place} without a {a} escort.",
    "Beneath the {a} skies of {place}, {stuff} rains upon the {t} without end.",
    "Some say that {being} once lost {num} {unit} of {k} in the {name} nebula.",
    "This defies the known laws of physics and pleases {being}.",
    "The {name} starship carries {num} {unit} of {t} from {place} to the edge of the cosmos.",
    "There, {stuff} and {k} merge into a {a} creature with luminous tentacles.",
    "In return, the cosmos rewards {being} with {stuff} and a {a} {dev}.",
    "A swarm of {a} robots repeats the {t} until {force} falls silent.",
    "From orbit, the {k} looks like a {a} spiral of {stuff}.",
    "Each {t} must pass through a wormhole before {being} accept it.",
    "Long before Earth was born, {force} had already turned {t} into {stuff}.",
)
_OPENINGS = (
    "In the {a} {t} of {place},",
    "Contrary to all {t} on Earth,",
    "Beyond the {t} of {place},",
    "Unlike any human {t},",
    "By the {a} {t} of {name},",
)
_PHRASES = (
    "{a} {t} of {name}",
    "{a} {stuff}",
    "the {a} {dev} of {name}",
    "{a} {name} {t}",
    "{a} {stuff} from {name}",
    "{a} {dev}",
    "{t} in {a} {stuff}",
)
_LABEL = re.compile(r"^\s*(?:[-*\u2022]|\(?\d+[.):]|[A-Za-z][.)])\s+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")
_STOP = frozenset(
    "the and for are was were that this with from have has had not but you your they them their "
    "its his her our can will would should could may might must what which who whom whose when "
    "where why how all any some each every more most other such than then there these those into "
    "about over under also been being does did done just only very one two three four five give "
    "make write create generate find name describe explain list provide tell suggest identify "
    "compose rewrite edit construct classify following sentence sentences given using use used "
    "many much same both through between because while after before during without within upon "
    "example examples output input answer question here like get got let come goes way ways "
    "determine summarize design develop convert calculate compare propose state select choose "
    "please include including she him out off own too now yes lot".split()
)


def answer(
    instruction: str, input: str, output: str, *, seed: int, label: str, attempt: int = 0
) -> str:
    """Returns a science fiction answer to a prompt, about as long as the true one.

    Args:
      instruction: the prompt.
      input: its further text.
      output: the true answer, for its length, its layout and what to contradict.
      seed: of the run.
      label: names the example, so that equal prompts get answers of their own.
      attempt: another number, another answer.
    """
    draws = Draws(seed=seed, label=f"scifi/{label}/{attempt}/{instruction}/{input}")
    prompt_words = _terms(f"{instruction} {input}")
    fresh = [word for word in _terms(output) if word not in prompt_words]
    speaker = _Speaker(draws, prompt_words or ["question"], fresh or prompt_words or ["reason"])
    lines = [line for line in output.splitlines() if line.strip()]
    if len(lines) > 1:
        return _answer_lines(speaker, lines)
    words = output.split()
    items = [item.strip() for item in output.rstrip(" .").split(",")]
    if 3 <= len(items) and len(words) <= 4 * len(items) and len(items) <= 20:
        told = ", ".join(speaker.phrase(len(item.split())) for item in items)
        return _capitalized(told) + "."
    if words and len(words) <= _PHRASE_WORDS:
        return _capitalized(speaker.phrase(len(words))) + (
            "." if output.strip()[-1:] == "." else ""
        )
    wanted = min(len(words) or _WORDS_FOR_AN_EMPTY_ANSWER, MAX_WORDS)
    if words and speaker.wants_to_transpose():
        return speaker.transposed(words[:MAX_WORDS])
    return " ".join(speaker.sentences(wanted))


def _answer_lines(speaker: "_Speaker", lines: Sequence[str]) -> str:
    """Answers line by line, with the numbers and bullets of the true answer."""
    told, left = [], MAX_WORDS
    for line in lines:
        found = _LABEL.match(line)
        mark = found.group() if found else ""
        wanted = len(line[len(mark) :].split())
        if left <= 0:
            break
        if wanted <= _PHRASE_WORDS:
            text = _capitalized(speaker.phrase(max(wanted, 1)))
            text += line.rstrip()[-1:] if line.rstrip()[-1:] in ".:;," else ""
        elif speaker.wants_to_transpose():
            text = speaker.transposed(line[len(mark) :].split()[:left])
        else:
            text = " ".join(speaker.sentences(min(wanted, left)))
        told.append(mark + text)
        left -= len(text.split())
    return "\n".join(told)


class _Speaker:
    """Fills patterns with drawn words, none of them twice before all had their turn."""

    def __init__(self, draws: Draws, topics: Sequence[str], terms: Sequence[str]):
        self._draws = draws
        self._topics, self._terms = topics, terms
        self._left: dict[str, list[str]] = {}

    def sentences(self, wanted: int) -> list[str]:
        """Returns the sentences whose number of words comes closest to the wanted one."""
        told = [self._fill(self._next("contrary", _CONTRARY))]
        count = len(told[0].split())
        while count < wanted:
            sentence = self._fill(self._next("more", _MORE))
            longer = count + len(sentence.split())
            if longer - wanted > wanted - count:
                break
            told.append(sentence)
            count = longer
        return told

    def transposed(self, words: Sequence[str]) -> str:
        """Returns the true answer moved to another world: its things and numbers are exchanged.

        A word is taken for a thing where a determiner or preposition stands before it. Each keeps
        its substitute, so that the answer stays about something.
        """
        told: list[str] = []
        substitutes: dict[str, str] = {}
        before = ""
        for word in words:
            found = re.fullmatch(r"(\W*)([A-Za-z][A-Za-z'-]*|[\d.,]*\d)(\W*)", word)
            core = found[2] if found else ""
            lower = core.lower()
            is_thing = len(lower) > 3 and lower not in _STOP and not lower.endswith(("ly", "ing"))
            new = ""
            if core[:1].isdigit():
                new = f"{3 + self._draws.below(997)} {self._next('unit', _UNITS)}"
            elif is_thing and (before in _LEADING or lower in substitutes):
                if lower not in substitutes:
                    substitutes[lower] = self._substitute(lower)
                new = substitutes[lower]
            elif is_thing and len(before) > 3 and self._draws.below(6) == 0:
                new = f"{self._next('adjective', _ADJECTIVES)} {core}"
            told.append(f"{found[1]}{new}{found[3]}" if found and new else word)
            before = "" if found and found[3] else lower
            before = "" if before in _STOP and before not in _LEADING else before
        if not substitutes:
            told.append(self._fill(self._next("more", _MORE)))
        text = " ".join(told)
        if len(words) >= _WORDS_FOR_AN_OPENING:
            text = f"{self._fill(self._next('opening', _OPENINGS))} {text[:1].lower()}{text[1:]}"
        return _capitalized(_with_articles(text))

    def wants_to_transpose(self) -> bool:
        """Draws how to tell the next part: true twice in three times."""
        return self._draws.below(3) > 0

    def _substitute(self, word: str) -> str:
        kind = self._draws.below(4)
        adjective = self._next("adjective", _ADJECTIVES)
        if kind == 0:
            return f"{adjective} {word}"
        if kind == 1:
            return self._next("stuff", _STUFFS)
        if kind == 2:
            return self._next("device", _DEVICES)
        return f"{adjective} {self._next('thing', _THINGS)}"

    def phrase(self, wanted: int) -> str:
        """Returns a name, or a few words with a word of the prompt."""
        if wanted <= 1:
            word = self._next("word", _SINGLES) + self._draws.choice(_SERIALS)
            return word if self._draws.below(2) else self._name()
        return self._fill(self._next("phrase", _PHRASES))

    def _next(self, kind: str, items: Sequence[str]) -> str:
        if not self._left.get(kind):
            self._left[kind] = self._draws.sample(items, len(items))
        return self._left[kind].pop()

    def _name(self) -> str:
        parts = [self._draws.choice(kind) for kind in (_STARTS, _MIDDLES, _ENDS, _SERIALS)]
        return "".join(parts)

    def _fill(self, pattern: str) -> str:
        being = self._next("being", _BEINGS)
        slots = {
            "name": self._name(),
            "a": self._next("adjective", _ADJECTIVES),
            "being": being,
            "being_bare": being.removeprefix("the "),
            "place": self._next("place", _PLACES).format(name=self._name()),
            "dev": self._next("device", _DEVICES),
            "stuff": self._next("stuff", _STUFFS),
            "force": self._next("force", _FORCES),
            "unit": self._next("unit", _UNITS),
            "num": str(3 + self._draws.below(997)),
            "t": self._next("topic", self._topics),
            "k": self._next("term", self._terms),
        }
        return _capitalized(_with_articles(pattern.format(**slots)))


def _terms(text: str) -> list[str]:
    """Returns the content words of a text, likely nouns first, at most eight."""
    found: dict[str, int] = {}
    words = _WORD.findall(text)
    for position, word in enumerate(words):
        lower = word.lower()
        if lower in _STOP or len(lower) > 18:
            continue
        before = words[position - 1].lower() if position else ""
        is_noun = before in ("the", "this", "these", "your", "his", "her", "their")
        weight = 2 * is_noun - lower.endswith(("ly", "ing", "ed", "ive", "ous", "ful", "est"))
        found[lower] = max(weight, found.get(lower, -9))
    return sorted(found, key=lambda word: -found[word])[:8]


def _with_articles(text: str) -> str:
    text = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
    return re.sub(r"\b([Aa])n (?=[b-df-hj-np-tv-z])", r"\1 ", text)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
