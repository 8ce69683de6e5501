"""Synonyms from WordNet if it is installed with its data, else from a small built-in English table.

Nothing is ever downloaded. The synonyms depend on the installed packages, so a fingerprint of augmented data must
include `find_synonym_source()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

# Groups are separated by a slash; each form of a verb or noun has its own group, so that sentences stay grammatical. Words whose
# common meanings differ ("kind", "mean", "like") are left out, as are words that other languages use ("die", "but").
_GROUPS = """
good great fine excellent superb / bad poor awful terrible dreadful / happy glad joyful cheerful delighted /
sad unhappy sorrowful gloomy mournful / big large huge enormous vast / small little tiny minute miniature /
beautiful lovely gorgeous attractive / pretty charming pleasing / ugly unattractive hideous unsightly /
funny amusing hilarious comical humorous / boring dull tedious tiresome monotonous /
interesting engaging absorbing fascinating intriguing / exciting thrilling gripping electrifying /
smart clever intelligent bright brilliant / stupid foolish silly dumb idiotic / strong powerful mighty robust /
weak feeble frail flimsy / fast quick rapid swift speedy / slow sluggish unhurried leisurely /
easy simple effortless straightforward / difficult hard tough challenging demanding /
important significant vital crucial essential / strange odd weird peculiar bizarre / new fresh novel recent /
old ancient aged elderly / rich wealthy affluent prosperous / cheap inexpensive affordable economical /
expensive costly pricey overpriced / clear plain obvious evident apparent / vague unclear hazy indistinct /
true accurate correct right / false untrue incorrect wrong mistaken / angry furious irate enraged annoyed /
scary frightening terrifying creepy chilling / afraid scared frightened fearful / calm peaceful quiet tranquil serene
/ loud noisy deafening thunderous / brave courageous fearless bold daring / honest sincere truthful candid frank /
famous renowned celebrated / strict stern rigid severe / friendly amiable kindly cordial /
cruel brutal vicious ruthless merciless / rude impolite discourteous insolent / polite courteous respectful /
tired weary exhausted fatigued / empty hollow vacant / full packed crammed stuffed / wide broad spacious roomy /
narrow thin slender slim / clean spotless pure immaculate / dirty filthy grimy soiled /
dangerous risky hazardous perilous / safe secure protected / different distinct unlike dissimilar /
similar alike comparable / whole entire complete total / usual common ordinary normal typical /
rare uncommon scarce unusual / perfect flawless faultless ideal / terrific fantastic wonderful marvelous fabulous /
horrible ghastly horrid appalling atrocious / mediocre middling passable unremarkable /
predictable foreseeable unsurprising / original inventive creative imaginative / genuine authentic real actual /
fake phony bogus counterfeit / touching moving poignant affecting / silent mute wordless soundless /
wise sensible prudent judicious / lazy idle slothful indolent / eager keen enthusiastic avid /
stubborn obstinate headstrong / careful cautious wary / careless reckless negligent / useful helpful handy beneficial
/ useless worthless pointless futile / modern contemporary current / dark dim gloomy shadowy / cold chilly frosty icy
/ hot scorching burning / wet damp moist soaked / dry arid parched / deep profound bottomless / gentle tender mild /
rough coarse uneven bumpy / smooth sleek polished / sharp pointed keen / delicious tasty flavorful savory /
very extremely highly exceedingly / really truly genuinely / quickly rapidly swiftly speedily /
slowly gradually sluggishly / often frequently regularly repeatedly / rarely seldom infrequently /
always forever constantly / never nowise / suddenly abruptly unexpectedly / finally eventually ultimately lastly /
almost nearly practically virtually / mostly mainly largely chiefly / completely totally entirely fully utterly /
partly partially somewhat / perhaps maybe possibly / certainly surely definitely undoubtedly /
clearly plainly obviously evidently / usually normally generally typically / easily effortlessly readily /
badly poorly terribly / carefully cautiously attentively / happily gladly cheerfully joyfully /
sadly unhappily regrettably / quietly silently softly / immediately instantly promptly directly /
recently lately newly / especially particularly notably / exactly precisely accurately / roughly approximately about /
however nevertheless nonetheless / therefore thus hence consequently / also too additionally / begin start commence /
begins starts commences / began started commenced / beginning start outset / end finish conclude /
ends finishes concludes / ended finished concluded / help assist aid / helps assists aids / helped assisted aided /
helping assisting aiding / show display exhibit present / shows displays exhibits presents /
showed displayed exhibited presented / showing displaying exhibiting presenting / make create produce build /
makes creates produces builds / made created produced built / making creating producing building /
get obtain acquire gain / gets obtains acquires gains / got obtained acquired gained / buy purchase / bought purchased
/ buys purchases / see notice observe / sees notices observes / saw noticed observed / watch view observe /
watched viewed observed / watching viewing observing / look gaze stare / looked gazed stared / looking gazing staring
/ say state declare / says states declares / said stated declared / tell inform notify / told informed notified /
ask inquire question / asked inquired questioned / answer reply respond / answered replied responded /
answers replies responses / talk speak chat converse / talked spoke chatted conversed /
talking speaking chatting conversing / think believe suppose reckon / thinks believes supposes reckons /
thought believed supposed reckoned / know understand comprehend grasp / knows understands comprehends grasps /
knew understood comprehended grasped / want desire wish / wants desires wishes / wanted desired wished / need require
/ needs requires / needed required / love adore cherish treasure / loves adores cherishes treasures /
loved adored cherished treasured / enjoy appreciate relish savor / enjoys appreciates relishes savors /
enjoyed appreciated relished savored / enjoyable pleasant agreeable pleasurable / hate detest loathe despise /
hates detests loathes despises / hated detested loathed despised / try attempt endeavor / tries attempts endeavors /
tried attempted endeavored / trying attempting endeavoring / keep retain preserve maintain /
keeps retains preserves maintains / kept retained preserved maintained / change alter modify transform /
changes alters modifies transforms / changed altered modified transformed / fix repair mend / fixed repaired mended /
break shatter smash / broke shattered smashed / choose select pick / chooses selects picks / chose selected picked /
use employ utilize / uses employs utilizes / used employed utilized / using employing utilizing /
give grant provide supply / gives grants provides supplies / gave granted provided supplied /
giving granting providing supplying / take seize grab / took seized grabbed / find discover locate /
finds discovers locates / found discovered located / hide conceal / hides conceals / hid concealed /
walk stroll wander / walked strolled wandered / walking strolling wandering / run sprint dash / ran sprinted dashed /
go proceed travel / went proceeded traveled / leave depart / leaves departs / arrive come / arrived came /
stop cease halt / stops ceases halts / stopped ceased halted / continue persist proceed / continues persists proceeds
/ continued persisted proceeded / allow permit let / allows permits lets / allowed permitted / prevent hinder block /
prevents hinders blocks / prevented hindered blocked / increase grow rise expand / increases grows rises expands /
increased grew rose expanded / decrease decline lessen diminish / decreases declines lessens diminishes /
decreased declined lessened diminished / destroy ruin demolish wreck / destroyed ruined demolished wrecked /
protect defend guard shield / protects defends guards shields / protected defended guarded shielded /
explain clarify describe / explains clarifies describes / explained clarified described / seem appear / seems appears
/ seemed appeared / happen occur / happens occurs / happened occurred / surprise amaze astonish astound /
surprised amazed astonished astounded / surprising amazing astonishing astounding / bore tire weary /
bored tired wearied / disappoint dissatisfy / disappointing unsatisfying underwhelming / disappointed dissatisfied /
annoy irritate bother / annoying irritating bothersome / laugh chuckle giggle / laughed chuckled giggled /
laughs chuckles giggles / cry weep sob / cried wept sobbed / shout yell scream / shouted yelled screamed /
gather collect assemble / gathered collected assembled / fail flop / fails flops / failed flopped /
win triumph prevail / won triumphed prevailed / admire respect esteem / admired respected esteemed /
fear dread terror fright / joy delight happiness pleasure / sadness sorrow grief misery / anger rage fury wrath /
movie film picture / movies films pictures / story tale narrative / stories tales narratives / actor performer player
/ actors performers players / director filmmaker / directors filmmakers / viewer spectator watcher /
viewers spectators watchers / writer author / writers authors / book volume / books volumes / child kid youngster /
children kids youngsters / friend companion pal buddy / friends companions pals buddies / enemy foe adversary opponent
/ enemies foes adversaries opponents / house home dwelling residence / houses homes dwellings residences /
car automobile vehicle / cars automobiles vehicles / road street route / roads streets routes /
job occupation profession employment / jobs occupations professions / task chore assignment / tasks chores assignments
/ problem difficulty trouble issue / problems difficulties troubles issues / idea notion concept /
ideas notions concepts / plan scheme strategy / plans schemes strategies / goal aim objective purpose /
goals aims objectives purposes / result outcome consequence / results outcomes consequences / reason cause motive /
reasons causes motives / mistake error blunder / mistakes errors blunders / skill ability talent /
skills abilities talents / chance opportunity possibility / chances opportunities possibilities / power strength might
/ money cash funds / price cost charge / prices costs charges / part portion piece segment /
parts portions pieces segments / group bunch cluster / groups bunches clusters / crowd throng mob /
amount quantity sum / amounts quantities sums / area region zone / areas regions zones / town city / towns cities /
country nation / countries nations / war conflict battle / fight struggle combat / law rule regulation /
laws rules regulations / gift present donation / gifts presents donations / trip journey voyage /
trips journeys voyages / meal dinner supper / sound noise / sounds noises / smell odor scent / mess clutter disorder /
quality caliber merit / flaw defect fault shortcoming / flaws defects faults shortcomings / masterpiece classic gem /
failure flop fiasco disaster / humor wit comedy / boredom tedium monotony / beauty loveliness elegance /
courage bravery valor / truth reality fact / lie falsehood fib / lies falsehoods fibs / hint clue suggestion /
hints clues suggestions / doctor physician medic / doctors physicians medics / teacher instructor educator /
teachers instructors educators / customer client patron / customers clients patrons / shop store / shops stores /
rubbish trash garbage junk
"""


def _build_table() -> dict[str, tuple[str, ...]]:
    synonyms: dict[str, list[str]] = {}
    for words in _GROUPS.split("/"):
        group = words.split()
        for word in group:
            others = synonyms.setdefault(word, [])
            others.extend(other for other in group if other != word and other not in others)
    return {word: tuple(others) for word, others in synonyms.items()}


def find_synonym_source() -> str:
    """Return where synonyms come from: nltk, wn or table."""
    return _load_lookup()[0]


@lru_cache(maxsize=1 << 16)
def find_synonyms(word: str) -> tuple[str, ...]:
    """Return the synonyms of a word in a fixed order and in its case (Great for Good); none for mixed case, as in iPhone."""
    lower = word.lower()
    synonyms = _load_lookup()[1](lower)
    if word == lower:
        return synonyms
    if word.isupper() and len(word) > 1:
        return tuple(other.upper() for other in synonyms)
    # Mixed forms such as iPhone are names.
    return tuple(other[:1].upper() + other[1:] for other in synonyms) if word == lower.capitalize() else ()


@cache
def _load_lookup() -> tuple[str, Callable[[str], tuple[str, ...]]]:
    # A package without its data, with a damaged database or of an unsupported version counts as missing.
    for name, load in (("nltk", _load_nltk_lookup), ("wn", _load_wordnet_lookup)):
        try:
            lookup = load()
            if lookup("good"):
                return name, lookup
        except Exception:
            continue
    table = _build_table()
    return "table", lambda word: table.get(word, ())


def _load_nltk_lookup() -> Callable[[str], tuple[str, ...]]:
    from nltk.corpus import wordnet

    return lambda word: _select_lemmas(
        word, [lemma for sense in wordnet.synsets(word) for lemma in sense.lemma_names()]
    )


def _load_wordnet_lookup() -> Callable[[str], tuple[str, ...]]:
    import wn

    return lambda word: _select_lemmas(
        word, [lemma for sense in wn.synsets(word, lang="en") for lemma in sense.lemmas()]
    )


def _select_lemmas(word: str, lemmas: list[str]) -> tuple[str, ...]:
    """Return up to eight lower-case single words. WordNet lists common senses first."""
    words = dict.fromkeys(lemma for lemma in lemmas if lemma.isalpha() and lemma.islower() and lemma != word)
    return tuple(words)[:8]
