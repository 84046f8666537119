"""Write stories by a grammar with a memory: who is where, who holds what, what belongs to whom, how many coins are left.

Later sentences depend on earlier ones, so a model that remembers more predicts better. Words are drawn by Zipf's law, names and
towns are put together of syllables; there is no end of stories, and each is a function of the seed and its number alone. Only
`Random.random()` is drawn from, which Python promises to keep for a seed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random


@dataclass(frozen=True)
class Stories:
    """Stories are short texts, as many as make up `characters`; each pass over them gives the same ones. `sk.text` takes them."""

    characters: int
    seed: int = 0

    def __iter__(self) -> Iterator[str]:
        written = number = 0
        while written < self.characters:
            text = self.story(number)
            yield text
            written, number = written + len(text), number + 1

    def story(self, number: int) -> str:
        """Return one story, of endlessly many, by its number."""
        return _Story(Random(f"{self.seed} {number}")).text()


def stories(characters: int, seed: int = 0) -> Stories:
    """Return stories that have `characters` characters together, the last one whole; another seed gives other stories.

    They are a source for `sk.text` and `sk.train_tokenizer`, written while they are read: about 10 million characters in some
    seconds. Raises ValueError for a number of characters that is not positive, or a negative seed.
    """
    for name, value, least in (("characters", characters, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"stories({name}={value!r}): a whole number of at least {least}.")
    return Stories(characters, seed)


# Words --------------------------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


class _Zipf:
    """A _Zipf draws words, the n-th of them as often as 1 / (n + 2)."""

    def __init__(self, words: str | Sequence[str], between: str = " ") -> None:
        self._words = words = words.split(between) if isinstance(words, str) else words
        self._sums = list(accumulate(1 / (n + 2) for n in range(1, len(words) + 1)))

    def draw(self, random: Random) -> str:
        return self._words[bisect(self._sums, random.random() * self._sums[-1])]


def _joined(stems: str, ends: str) -> list[str]:
    """Return every stem with every ending, in an order that mixes both."""
    firsts, lasts = stems.split(), ends.split()
    found = [first + last for first in firsts for last in lasts]
    step = next(step for step in range(len(found) * 5 // 8, len(found)) if _coprime(step, len(found)))
    return [found[n * step % len(found)] for n in range(len(found))]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


_STEMS = (
    "Mar El Ros Cor Hel An Jul Sel Tam Ver Dor Cel Is Mir Ad Em Nor Sab Thal Wil Gwen Bri Kat Lor Fen Zel Or Bel Dal Ev Fal Gar "
    "Hal Iv Jor Kel Lin Mel Ned Ol"
)
_WOMEN = _Zipf(_joined(_STEMS, "ina a ia ela ette isa ora enna ilde wyn"))
_MEN = _Zipf(_joined(_STEMS, "o in us an ek ric bert mond as en ard ulf"))
_SURNAMES = _Zipf(
    _joined(
        "Black Green Stone Wood Hill Brook Marsh Ash Thorn Lock Reed Fair Long White Grey Hawk Wolf Fox Rook Swan Birch Elm Holt "
        "Combe Wick Pen Tre Har Win Row",
        "ley ton ford well man son wick by worth field shaw gate croft dale low",
    )
)
_TOWNS = _Zipf(
    _joined(
        "Ash Mill Oak Stone Red Clear Deep High Cold Sand Salt Silver Long Fern Hazel Raven Otter Heron Winter Summer East West "
        "North South King Queen Bishop Abbot Market Lamb Gold Iron Marl Moss Peat Thistle Barley Clover Drift Ember",
        "ford brook wick bridge mouth stead ham field haven cliff moor bury gate port minster combe holm mere water dale",
    )
)
_SPOTS = _Zipf(
    "market mill harbour bridge garden church square inn bakery well orchard tower library stable barn smithy school meadow forge "
    "river pond cellar attic kitchen courtyard chapel lighthouse quay forest hill cave quarry vineyard workshop theatre bathhouse "
    "town-hall station warehouse brewery dairy tannery shipyard graveyard fountain gatehouse greenhouse hayloft boathouse "
    "fairground watchtower"
)
_THINGS = _Zipf(
    "key lamp book ring letter map coat knife basket bell rope clock cup coin-purse flute drum mirror scarf lantern hammer spoon "
    "kettle candle hat glove boot needle thread comb brush pipe fan mask doll kite ball top whistle horn harp fiddle globe compass "
    "telescope vase bowl jug plate tray box chain lock buckle button ribbon shawl cloak blanket pillow saddle bridle whip spade "
    "rake sickle saw chisel plane axe net hook oar sail flag crown medal brooch bracelet necklace pearl ruby seal stamp quill "
    "inkwell scroll portrait statue feather shell fossil"
)
_LOOKS = _Zipf(
    "old silver small red wooden heavy golden blue broken new brass green bright long iron painted black rusty white tiny copper "
    "carved worn yellow glass stolen round polished grey striped plain crooked ivory dusty velvet woollen leather cracked "
    "gleaming mended bent purple pewter marble hollow scratched delicate engraved faded enormous narrow spotted silken thin thick "
    "borrowed lucky curious foreign tarnished amber bronze crystal jade linen oaken pale scarlet"
)
_BOXES = _Zipf("chest barrel drawer sack cupboard crate trunk jar bucket pot hamper cabinet wardrobe bin")
_FOODS = _Zipf(
    "bread soup cheese apples stew porridge pie honey cake plums fish rice eggs beans mushrooms pears nuts cherries pancakes "
    "cabbage carrots sausages dumplings figs noodles onions grapes biscuits custard trout turnips oatcakes lentils gingerbread "
    "chestnuts radishes olives peaches pickles marmalade"
)
_ANIMALS = _Zipf(
    "dog cat goat donkey raven pony goose parrot mouse hen fox rabbit ferret owl pig lamb magpie hedgehog tortoise squirrel"
)
_PETS = _Zipf(
    "Brisk Patch Button Pepper Dusty Smoke Bramble Nettle Pip Rusty Clover Mischief Biscuit Shadow Tansy Thimble Cobweb Fig "
    "Sorrel Juniper Burr Acorn Soot Marble"
)
_WEATHERS = _Zipf(
    "it rained|the sun shone|a cold wind blew|fog lay over the roofs|it was warm|snow fell|the sky was grey|there was thunder|"
    "the streets were wet|hail drummed on the windows|a rainbow stood over the hills|the air smelled of smoke|dew lay on the grass|"
    "the frost bit hard",
    between="|",
)
_MANNERS = _Zipf("quickly slowly quietly gladly at once carefully sadly proudly shyly hastily gently silently")
_RELATIONS = {
    "f": _Zipf("friend sister cousin neighbour aunt niece daughter rival grandmother teacher"),
    "m": _Zipf("friend brother cousin neighbour uncle nephew son rival grandfather teacher"),
}
_JOBS = (
    "miller:ground the grain baker:kneaded the dough smith:hammered a horseshoe tailor:sewed a sleeve fisher:mended the nets "
    "teacher:marked the slates doctor:mixed a potion sailor:spliced the ropes carpenter:planed a board gardener:pruned the roses "
    "weaver:threaded the loom potter:shaped a jug shepherd:counted the sheep brewer:stirred the barley cobbler:soled a boot "
    "mason:cut a stone painter:cleaned the brushes printer:set the type cooper:bent the hoops saddler:stitched a strap "
    "beekeeper:smoked the hives glazier:fitted a pane clerk:copied a deed cook:peeled the onions tinker:patched a kettle "
    "watchmaker:oiled a spring innkeeper:swept the taproom ferryman:tarred the boat hunter:set the snares judge:read the laws "
    "piper:practised a tune thatcher:tied the straw"
)
_WORK = dict(pair.split(":") for pair in _JOBS.replace(" the ", "_the_").replace(" a ", "_a_").split())
_JOB = _Zipf(list(_WORK))
_NATURE = _Zipf(
    "oak hedge cloud roof ivy willow path ditch fence wall gate chimney cart wagon puddle stream thorn rose daisy nettle fern "
    "branch root stump haystack beehive nest pebble boulder ladder bench signpost scarecrow windmill bonfire shadow moonbeam "
    "rainbow swarm flock herd footprint feather cobweb toadstool pinecone acorn poppy thistle ivy-leaf snowdrop lily reed "
    "bulrush pondweed driftwood seaweed starfish gull heron swallow thrush wren robin lark crow jackdaw kestrel moth beetle "
    "bumblebee dragonfly grasshopper snail spider worm toad newt lizard adder badger weasel otter stoat bat stag hare"
)
_SHADES = _Zipf(
    "little large quiet strange tall low dark shining wet dry young ancient lonely crowded wild tame sleepy noisy muddy clean "
    "pretty ugly heavy-footed swift lazy crimson golden-brown silvery leafy bare thorny mossy smoky windy frozen sunny misty "
    "gloomy cheerful fragrant sour tangled fallen hidden forgotten neat ragged sturdy brittle slender plump shaggy speckled "
    "trembling glittering gnarled weathered withered rustling dripping drowsy restless stubborn timid fierce"
)
_PREPOSITIONS = _Zipf("near behind under beside above beyond across-from over against among")
_NOTICES = _Zipf(
    "saw watched noticed admired drew heard described counted feared followed remembered imagined missed praised mocked "
    "sketched greeted startled studied avoided"
)
_DOES = _Zipf(
    "stood lay waited moved shook gleamed slept turned fell rose swayed vanished appeared rested lingered glowed creaked "
    "rustled drifted crumbled leaned sank hummed trembled sparkled hid"
)
_TOPICS = _Zipf(
    "war love winter taxes dreams the-sea ghosts money marriage music harvest the-king old-age luck trade travel history "
    "health the-moon dragons thieves pirates weddings holidays medicine numbers letters stars justice friendship"
)
_VIEWS = _Zipf(
    "useful dangerous overrated beautiful sad inevitable tiresome simple costly mysterious noble foolish necessary sweet bitter "
    "unfair exciting hopeless healthy pleasant"
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_HOURS = ("In the morning", "At noon", "In the afternoon", "In the evening", "At night")
_NUMBERS = _words(
    "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)


# A story -------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Person:
    name: str
    sex: str
    job: str
    food: str
    coins: int
    spot: str

    @property
    def he(self) -> str:
        return "she" if self.sex == "f" else "he"

    @property
    def his(self) -> str:
        return "her" if self.sex == "f" else "his"

    @property
    def him(self) -> str:
        return "her" if self.sex == "f" else "him"


@dataclass(eq=False)
class _Thing:
    look: str
    noun: str
    owner: _Person
    holder: _Person | None = None  # or it lies at
    spot: str = ""
    box: str = ""  # hidden in

    @property
    def the(self) -> str:
        return f"the {self.noun}"

    @property
    def named(self) -> str:
        return f"{self.look} {self.noun}"

    @property
    def place(self) -> str:
        return f"in the {self.box} at the {self.spot}" if self.box else f"at the {self.spot}"


@dataclass
class _Story:
    """A _Story is a world of a few persons and things, and what is told of it so far."""

    random: Random
    told: list[str] = field(default_factory=list)
    last: _Person | None = None  # of whom the last sentence was

    def text(self) -> str:
        self._begin()
        self._tell_persons()
        for _ in range(8 + self._below(14)):
            self._go_on()
        self._end()
        return " ".join(self.told)

    # -- drawing

    def _below(self, n: int) -> int:
        return int(self.random.random() * n)

    def _one(self, *values: str) -> str:
        return values[self._below(len(values))]

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _different(self, words: _Zipf, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            word = words.draw(self.random)
            if word not in found:
                found.append(word)
        return found

    # -- telling

    def _say(self, sentence: str, of: _Person | None = None) -> None:
        self.told.append(sentence[0].upper() + sentence[1:])
        self.last = of

    def _who(self, person: _Person) -> str:
        """Return how a sentence begins that is of this person."""
        if person is self.last and self._chance(0.7):
            return person.he
        return f"the {person.job}" if self._chance(0.15) else person.name

    def _begin(self) -> None:
        draw = self.random
        self.town = _TOWNS.draw(draw)
        self.spots = self._different(_SPOTS, 3 + self._below(3))
        self.day, self.hour = self._below(7), 0
        count = 2 + self._below(3)
        names: list[str] = []
        sexes = ["f" if self._chance(0.5) else "m" for _ in range(count)]
        for sex in sexes:
            name = (_WOMEN if sex == "f" else _MEN).draw(draw)
            while name in names:
                name = (_WOMEN if sex == "f" else _MEN).draw(draw)
            names.append(name)
        jobs, foods = self._different(_JOB, count), self._different(_FOODS, count)
        self.persons = [
            _Person(name, sex, job, food, 2 + self._below(15), self.spots[self._below(len(self.spots))])
            for name, sex, job, food in zip(names, sexes, jobs, foods)
        ]
        nouns, looks = self._different(_THINGS, 2 + self._below(2)), self._different(_LOOKS, 3)
        self.things = [
            _Thing(look, noun, self.persons[self._below(count)], spot=self.spots[self._below(len(self.spots))])
            for noun, look in zip(nouns, looks)
        ]
        self.pet = (_ANIMALS.draw(draw), _PETS.draw(draw)) if self._chance(0.5) else None

    def _tell_persons(self) -> None:
        first, *others = self.persons
        self._say(
            self._one(
                f"{first.name} {_SURNAMES.draw(self.random)} was {_a(first.job)} in {self.town}.",
                f"In {self.town} there lived {_a(first.job)} called {first.name}.",
                f"Once there was {_a(first.job)} in {self.town} whose name was {first.name}.",
            ),
            first,
        )
        self._say(f"{first.he} liked {first.food} more than anything, and had {self._coins(first)}.", first)
        for other in others:
            relation = _RELATIONS[other.sex].draw(self.random)
            self._say(
                self._one(
                    f"{first.his} {relation} {other.name} was {_a(other.job)}, who always ate {other.food}.",
                    f"{other.name}, {first.his} {relation}, worked as {_a(other.job)} and loved {other.food}.",
                ),
                other,
            )
            if self._chance(0.5):
                self._say(f"{other.he} had {self._coins(other)}.", other)
        if self.pet is not None:
            self._say(f"{first.name} had {_a(self.pet[0])} called {self.pet[1]}.", first)
        for thing in self.things:
            if self._chance(0.4):
                thing.box = _BOXES.draw(self.random)
            owner = thing.owner
            self._say(
                self._one(
                    f"{owner.name} owned {_a(thing.named)}, which lay {thing.place}.",
                    f"{thing.place} lay {_a(thing.named)} that belonged to {owner.name}.",
                ),
                owner,
            )
        self._say(f"on {_DAYS[self.day]}, {_WEATHERS.draw(self.random)}, and {self._whereabouts(first)}.", first)

    def _coins(self, person: _Person) -> str:
        return f"{_NUMBERS[person.coins]} coin{'s' * (person.coins != 1)}"

    def _whereabouts(self, person: _Person) -> str:
        return f"{self._who(person)} was at the {person.spot}"

    def _present(self, spot: str) -> list[_Person]:
        return [person for person in self.persons if person.spot == spot]

    def _held(self, person: _Person) -> list[_Thing]:
        return [thing for thing in self.things if thing.holder is person]

    # -- events

    def _go_on(self) -> None:
        """Tell what happens next: to the person of the last sentence mostly, and what can happen there."""
        stays = self.last is not None and self._chance(0.6)
        person = self.last if stays and self.last is not None else self.persons[self._below(len(self.persons))]
        for _ in range(6):
            if _EVENTS[self._below(len(_EVENTS))](self, person):
                return
        self._walk(person)

    def _walk(self, person: _Person) -> bool:
        spot = self.spots[self._below(len(self.spots))]
        if spot == person.spot:
            return False
        there, held = self._present(spot), self._held(person)
        person.spot = spot
        who = self._who(person)
        how = f" {_MANNERS.draw(self.random)}" if self._chance(0.2) else ""
        carrying = f" with {held[0].the}" if held and self._chance(0.5) else ""
        self._say(f"{who} {self._one('went', 'walked', 'ran', 'came')}{how} to the {spot}{carrying}.", person)
        if there and self._chance(0.6):
            names = " and ".join(other.name for other in there)
            self._say(f"{names} {'was' if len(there) == 1 else 'were'} there already.", person)
        elif self.pet is not None and person is self.persons[0] and self._chance(0.5):
            self._say(f"{self.pet[1]} the {self.pet[0]} came along.", person)
        return True

    def _find(self, person: _Person) -> bool:
        for thing in self.things:
            if thing.holder is None and thing.spot == person.spot:
                who = self._who(person)
                if thing.box:
                    self._say(f"{who} opened the {thing.box}, and inside was the {thing.named}.", person)
                    self._say(f"{person.he} {self._one('took it', 'picked it up')}.", person)
                else:
                    self._say(f"{who} {self._one('saw', 'found', 'noticed')} {thing.the} and took it.", person)
                thing.holder, thing.box = person, ""
                return True
        return False

    def _give(self, person: _Person) -> bool:
        held = self._held(person)
        others = [other for other in self._present(person.spot) if other is not person]
        if not held or not others:
            return False
        thing, other = held[self._below(len(held))], others[self._below(len(others))]
        if thing.owner is other or self._chance(0.4):
            who = self._who(person)
            self._say(
                self._one(
                    f"{who} gave {thing.the} to {other.name}.",
                    f"{who} handed {other.name} {thing.the}.",
                    f"{other.name} asked for {thing.the}, and {person.name} gave it to {other.him}.",
                ),
                other,
            )
            thing.holder = other
            if thing.owner is other:
                self._say(f'"Thank you, {person.name}," said {other.name}, for it was {other.his} own.', other)
            return True
        self._say(f"{other.name} wanted {thing.the}, but {person.name} kept it.", person)
        return True

    def _hide(self, person: _Person) -> bool:
        held = self._held(person)
        if not held:
            return False
        thing = held[self._below(len(held))]
        thing.holder, thing.spot = None, person.spot
        thing.box = _BOXES.draw(self.random) if self._chance(0.5) else ""
        verb = "hid" if thing.box else self._one("left", "forgot", "dropped")
        self._say(f"{self._who(person)} {verb} {thing.the} {thing.place}.", person)
        return True

    def _ask(self, person: _Person) -> bool:
        others = [other for other in self.persons if other is not person and other.spot == person.spot]
        if not others:
            return False
        other, thing = others[self._below(len(others))], self.things[self._below(len(self.things))]
        if thing.holder is person:
            return False
        self._say(f'"{self._one("Where is", "Who has", "Have you seen")} {thing.the}?" asked {person.name}.', person)
        if thing.holder is other:
            self._say(f'"I have it here," said {other.name}.', other)
        elif thing.holder is not None:
            self._say(f'"{thing.holder.name} has it at the {thing.holder.spot}," said {other.name}.', person)
        else:
            self._say(f'"It lies {thing.place}," said {other.name}.', person)
        return True

    def _buy(self, person: _Person) -> bool:
        if person.coins < 2:
            return False
        price = 1 + self._below(min(person.coins - 1, 5))
        before = self._coins(person)
        person.coins -= price
        food = person.food if self._chance(0.7) else _FOODS.draw(self.random)
        left = f"{_NUMBERS[person.coins]} {'was' if person.coins == 1 else 'were'} left"
        self._say(f"{self._who(person)} had {before} and paid {_NUMBERS[price]} for {food}, so {left}.", person)
        return True

    def _pay(self, person: _Person) -> bool:
        others = [other for other in self._present(person.spot) if other is not person]
        if not others or person.coins < 3:
            return False
        other, price = others[self._below(len(others))], 1 + self._below(2)
        if other.coins + price >= len(_NUMBERS):
            return False
        person.coins, other.coins = person.coins - price, other.coins + price
        self._say(
            f"{self._who(person)} paid {other.name} {_NUMBERS[price]} for {other.his} help, and now {other.name} had "
            f"{self._coins(other)}.",
            other,
        )
        return True

    def _eat(self, person: _Person) -> bool:
        self._say(f"{self._who(person)} was hungry and ate {person.food}, as always.", person)
        return True

    def _work(self, person: _Person) -> bool:
        self._say(f"{self._who(person)} {_WORK[person.job].replace('_', ' ')}.", person)
        return True

    def _time(self, person: _Person) -> bool:
        if self.hour == len(_HOURS) - 1:
            self.day, self.hour = (self.day + 1) % 7, 0
            self._say(f"the next day was {_DAYS[self.day]}, and {_WEATHERS.draw(self.random)}.", person)
        else:
            self.hour += 1
            self._say(f"{_HOURS[self.hour]} {_WEATHERS.draw(self.random)}.", person)
        return True

    def _feel(self, person: _Person) -> bool:
        for thing in self.things:
            if thing.owner is person:
                if thing.holder is person:
                    self._say(f"{self._who(person)} was glad to have {person.his} {thing.noun}.", person)
                elif thing.holder is not None:
                    self._say(
                        f"{self._who(person)} was {self._one('sad', 'angry', 'worried')}, because {thing.holder.name} had "
                        f"{person.his} {thing.noun}.",
                        person,
                    )
                else:
                    self._say(f"{self._who(person)} thought of {person.his} {thing.noun} {thing.place}.", person)
                return True
        return False

    def _look(self, person: _Person) -> bool:
        others = [other.name for other in self._present(person.spot) if other is not person]
        what = f"only {' and '.join(others)}" if others else "nobody else"
        self._say(f"at the {person.spot}, {self._who(person)} saw {what}.", person)
        return True

    def _notice(self, person: _Person) -> bool:
        """Tell something that nothing follows from."""
        draw = self.random
        shade, other_shade, nature, other = (w.draw(draw) for w in (_SHADES, _SHADES, _NATURE, _NATURE))
        where = _PREPOSITIONS.draw(draw).replace("-", " ")
        if self._chance(0.5):
            self._say(
                f"{self._who(person)} {_NOTICES.draw(draw)} {_a(f'{shade} {nature}')} {where} the {other_shade} {other}.",
                person,
            )
        else:
            self._say(f"the {shade} {nature} {_DOES.draw(draw)} {where} {_a(f'{other_shade} {other}')}.", self.last)
        return True

    def _talk(self, person: _Person) -> bool:
        others = [other for other in self._present(person.spot) if other is not person]
        if not others:
            return False
        other, draw = others[self._below(len(others))], self.random
        topic, view = _TOPICS.draw(draw).replace("-", " "), _VIEWS.draw(draw)
        self._say(f"{self._who(person)} and {other.name} talked about {topic}.", person)
        if self._chance(0.6):
            self._say(f'"{topic[0].upper()}{topic[1:]}? How {view}!" {self._one("said", "cried")} {other.name}.', other)
        return True

    def _end(self) -> None:
        self._say(f"so ended that {_DAYS[self.day]} in {self.town}.")
        for thing in self.things:
            if thing.holder is not None:
                self._say(f"{thing.holder.name} had the {thing.named}.")
            else:
                self._say(f"the {thing.named} was {thing.place}.")


_EVENTS: tuple[Callable[[_Story, _Person], bool], ...] = (
    _Story._walk,
    _Story._walk,
    _Story._find,
    _Story._find,
    _Story._give,
    _Story._give,
    _Story._hide,
    _Story._ask,
    _Story._ask,
    _Story._buy,
    _Story._pay,
    _Story._eat,
    _Story._work,
    _Story._time,
    _Story._feel,
    _Story._look,
    _Story._talk,
    _Story._notice,
    _Story._notice,
    _Story._notice,
    _Story._notice,
)


def _a(words: str) -> str:
    """Return words with the indefinite article."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
