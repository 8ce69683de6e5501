"""Detect the language of a text by its script and, among languages that share one, by frequent words and letters.

Meant for dropping texts in the wrong language, not for fine distinctions: texts in Latin or Cyrillic letters need at least
three words, and a language that is not in the tables is detected as its nearest relative.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import numpy as np

# First code point of each range, and its script, or its language if only one uses it; "" for characters other than letters.
_RANGES: tuple[tuple[int, str], ...] = (
    (0x0000, ""), (0x0041, "latin"), (0x005B, ""), (0x0061, "latin"), (0x007B, ""), (0x00C0, "latin"), (0x0250, ""),
    (0x0370, "el"), (0x0400, "cyrillic"), (0x0530, "hy"), (0x0590, "he"), (0x0600, "arabic"), (0x0700, ""),
    (0x0750, "arabic"), (0x0780, ""), (0x0900, "hi"), (0x0980, "bn"), (0x0A00, "pa"), (0x0A80, "gu"), (0x0B00, "or"),
    (0x0B80, "ta"), (0x0C00, "te"), (0x0C80, "kn"), (0x0D00, "ml"), (0x0D80, "si"), (0x0E00, "th"), (0x0E80, "lo"),
    (0x0F00, "bo"), (0x1000, "my"), (0x10A0, "ka"), (0x1100, "ko"), (0x1200, "am"), (0x1380, ""), (0x1780, "km"),
    (0x1800, ""), (0x1E00, "latin"), (0x1F00, "el"), (0x2000, ""), (0x3040, "ja"), (0x3100, "zh"), (0x3130, "ko"),
    (0x3190, ""), (0x3400, "zh"), (0x4DC0, ""), (0x4E00, "zh"), (0xA000, ""), (0xAC00, "ko"), (0xD7B0, ""),
    (0xF900, "zh"), (0xFB00, ""), (0xFB50, "arabic"), (0xFE00, ""), (0xFE70, "arabic"), (0xFEFF, ""), (0xFF66, "ja"),
    (0xFFA0, ""), (0x20000, "zh"), (0x32000, ""),
)  # fmt: skip
_RANGE_STARTS = np.array([start for start, _ in _RANGES], dtype=np.uint32)
_SCRIPTS = sorted({script for _, script in _RANGES})
_SCRIPT_OF_RANGE = np.array([_SCRIPTS.index(script) for _, script in _RANGES])

# The most frequent words of each language, in lower case.
_WORDS = {
    "en": "the a i he me us of and to in is that was it for with as his on be at by this had not are but from or have "
    "an they which you were all her she there would their we him been has when who will no more if out so what up said its than into "
    "them can only some could these two may then do my about your just don't it's any how our after very because where",
    "de": "der die das und ist nicht ein eine einen einem einer zu von mit sich des den dem auf für im es ich wir sie er "
    "auch als an nach wie bei oder aber aus wenn nur noch werden wurde hat haben sind war kann mehr über um so zum zur "
    "dass durch man vor bis sein seine ihr ihre uns mir mich kein keine was schon sehr diese dieser gegen unter",
    "fr": "le la les de des du et est un une en que qui dans pour pas par sur au aux avec ce cette ces il elle ils elles "
    "nous vous je ne se son sa ses mais ou où plus comme leur leurs été être fait tout tous sont était même aussi bien "
    "sans si on lui mon ma mes votre notre très peut avait c'est d'un d'une n'est qu'il quand encore",
    "es": "el la los las de del y en que es un una no se por con para su sus al lo como más pero le les ha este esta "
    "esto ese esa o sin sobre también hay cuando muy ya fue son todo todos entre está están ser tiene porque desde yo "
    "me mi tu nos había nada hasta donde quien ella ellos uno dos años puede hace así",
    "it": "il lo la i gli le di del della dei delle dello e è un una uno che in non per con si da dal dalla al alla ai "
    "alle nel nella sul sulla come più ma anche se sono ha ho hanno questo questa quello quella suo sua loro essere "
    "stato era molto tutto tutti quando dove chi mi ti ci noi voi lei lui dopo ancora perché solo fatto c'è",
    "pt": "o a os as de do da dos das e em no na nos nas que é um uma não se por com para ao à mais como mas foi seu sua "
    "ele ela eles elas isso este esta ou são já também muito quando nem só pelo pela até ser tem há está eu você me meu "
    "minha foram entre depois sem mesmo aos seus quem nós lhe tudo onde ainda fazer porque",
    "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als maar bij door dan ze hij ik je we nog "
    "wel naar uit kan wordt werd heeft hebben had was tot over of die dit deze zou geen hun haar mijn meer veel zich zo "
    "wat wie waar daar al onder tegen na moet worden ons hem heel",
    "sv": "och att det i en ett som är på av för med den till inte om han var har jag de men vi sig från så kan när hade "
    "man ska nu där eller bara vid efter upp även hon mycket denna detta dem mot under mellan över alla sin sina sitt "
    "skulle blir blev varit hur vad mig dig inom utan också någon några",
    "da": "og at det i en et som er på af for med den til ikke om han var har jeg de men vi sig fra så kan når havde man "
    "skal nu der eller kun ved efter op også hun meget denne dette dem mod under mellem over alle sin sine sit skulle "
    "bliver blev været hvordan hvad mig dig uden nogle noget os blevet kunne hvor deres hvis mere end",
    "no": "og å det i en et som er på av for med den til ikke om han var har jeg de men vi seg fra så kan når hadde man "
    "skal nå der eller bare ved etter opp også hun mye denne dette dem mot under mellom over alle sin sine sitt skulle "
    "blir ble vært hvordan hva meg deg uten noen noe oss blitt kunne hvor deres hvis mer enn ei ikkje eg",
    "fi": "ja on ei se että oli hän en mutta ovat kun niin joka mitä myös kuin tai jos vain sen nyt ole hänen mukaan "
    "olla minä sinä me te he tämä tämän vielä voi mikä jo sekä sitten siitä jotka ollut hyvin kanssa jälkeen ennen "
    "kaikki paljon koska missä olen olemme eivät minun näin sitä",
    "pl": "i w na z się nie do to że jest jak o po co ale za od tak przez już tylko dla jego go są był była było być "
    "może czy ich który która które przed przy tego tej tym jej bardzo oraz także jako gdy kiedy gdzie nad pod mnie "
    "mam ma aby lub bez ten ta te wszystko jeszcze więc nas roku",
    "cs": "a v se na je že to s z do i o k ve pro za by ale jako po jak tak od být byl byla bylo jsou jsem jsme které "
    "který která už jeho jen nebo při podle až také bez než co kdy kde pak ještě může velmi před když tento této toho "
    "jejich má není aby ze mezi však nás mi si roku",
    "tr": "ve bir bu da de için ile çok ne daha ama gibi olarak var ben sen o biz siz onun olan kadar her en mi mı değil "
    "sonra ki veya ya oldu olduğu diye şey bana sana hiç bütün nasıl neden ise olduğunu tarafından yok iyi şu zaman "
    "önce göre büyük kendi ancak şimdi bunu",
    "ro": "și în de la cu pe nu o un că care este din a se mai pentru ca sunt au fost ce dar sau dintre lui ei această "
    "acest prin după între când unde foarte doar are era el ea noi voi îi îl le s-a fi fie toate tot sa său lor fără "
    "către până spre am ai despre decât bine atunci",
    "hu": "a az és hogy nem is egy de ez meg volt csak már még van mint ha el azt ki mi ezt vagy kell lesz minden után "
    "pedig én te ő mert fel amely volna lehet itt ott akkor nagyon sem két alatt között majd vissza nincs több jó ezek "
    "voltak által mindig miért hol valaki",
    "vi": "và của là có không được trong cho một những các đã với người này để khi tôi từ đến như cũng ra thì về vào lại "
    "đó sẽ nhiều bị phải rất ở nhưng hay nếu chúng anh em ông bà nó làm năm còn theo trên sau chỉ hơn đang tại bởi nào",
    "id": "yang dan di dari untuk dengan pada ini itu tidak dalam adalah akan ke saya kami kita mereka juga oleh ada "
    "sebagai telah bisa atau karena dia sudah seperti anda lebih dapat harus banyak hanya saat bahwa tersebut orang "
    "tahun hari lagi sangat belum masih antara setelah apa semua namun menjadi",
    "ru": "и в не на я быть он с что а по это она этот к но они мы весь который из у то за свой от так о для ты же все "
    "год вы такой его только или ещё бы себя один как уже до если когда вот мне было был была были есть их чтобы нет "
    "очень при может во со под где эти этого после",
    "uk": "і в не на я бути він з що а по це вона цей до але вони ми який із у та за свій від так про для ти же все рік "
    "ви такий його тільки або ще би себе один як вже якщо коли ось мені було був була були є їх щоб немає дуже при може "
    "під де ці цього після також й та й чи людей",
    "bg": "и в не на аз съм той с че а по това тя този към но те ние който от у за свой така о ти се все година вие "
    "такъв го само или още би себе си един като вече до ако когато ето ми беше бил била са има ги да няма много при "
    "може във със под къде тези след също е ще ли как",
}

# Parts of words that are typical of a language, separated by |; a space is the edge of a word.
_TYPICAL_PARTS = {
    "en": " th|ing |ght| wh|ould| kn|ly ",
    "de": "sch|ß|ung |icht|ei|ö|ü|tz|keit ",
    "fr": "eux |ait | qu'| l'| d'|ç|œ|eau|ê|tion |ù",
    "es": "ñ|ción|í|ó|ll| ¿|ando |idad ",
    "it": "zione|gli|cch|zz|ò|ù|tà |sci|aggio |tto |tti |rno ",
    "pt": "ção|ções|ã|õ|lh|nh|ê|ç|dade ",
    "nl": "ij|oe|aa|uu|sch|eeu|lijk | ge",
    "sv": "å|ä|ö|ck|sj|tion|ningen ",
    "da": "æ|ø|å|gt|hed |lse |nde ",
    "no": "æ|ø|å|kj|øy|het |else |ene ",
    "fi": "ää|kk|ssa |ssä |yy|uo|ie|lla |llä |sta |ksi ",
    "pl": "ł|ż|ś|ą|ę|cz|sz|rz|ć|ów ",
    "cs": "ř|ě|ů|č|ž|š|ý |ch |ého ",
    "tr": "ı|ğ|ş|ler |lar |yor|dır |dir |ç",
    "ro": "ă|ț|ș|ţ|ş|ului |ea |î|iei ",
    "hu": "ő|ű|sz|gy|á|ség |nak |nek |ban |ben ",
    "vi": "ng |đ|ư|ơ|ạ|ế|ộ|nh |ấ|ề|ả",
    "id": "kan |nya | ber| meng| peng| ter|ang ",
    "ru": "ы|э|ъ|ться |ого |ения |ё",
    "uk": "і|ї|є|ґ|ння |ого |ськ",
    "bg": "ъ|щ|ата |ите |ът |ват |ане ",
}

_CYRILLIC = ("ru", "uk", "bg")
_LANGUAGES_BY_SCRIPT = {"latin": [code for code in _WORDS if code not in _CYRILLIC], "cyrillic": list(_CYRILLIC)}
_SCRIPTS_AND_LANGUAGES = {*_SCRIPTS, *_WORDS, "ar", "fa", "ur"}
LANGUAGES = frozenset(_SCRIPTS_AND_LANGUAGES - {"", "latin", "cyrillic", "arabic"})

# A word of several languages counts fully for each of them: when it counted as a fraction, 40 more of 6,920 English reviews
# were not detected as English.
_WORD_LANGUAGES: dict[str, list[str]] = {}
for _code, _words in _WORDS.items():
    for _word in _words.split():
        _WORD_LANGUAGES.setdefault(_word, []).append(_code)
FREQUENT_WORDS = frozenset(_WORD_LANGUAGES)

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_SAMPLE_CHARACTERS = 4000  # Characters used: half from the beginning, half from the middle.
_MIN_LETTERS = 10
_MIN_CJK_CHARACTERS = 4  # Fewer for Chinese, Japanese and Korean, whose characters are syllables or words.
_UNSPACED = re.compile(
    "([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U00031fff])|[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"
)


def detect_language(text: str) -> tuple[str, float]:
    """Return the language code and a confidence from 0 to 1; ("", 0.0) if the text is too short or unknown."""
    if len(text) > _SAMPLE_CHARACTERS:
        middle = len(text) // 2
        text = f"{text[: _SAMPLE_CHARACTERS // 2]} {text[middle : middle + _SAMPLE_CHARACTERS // 2]}"
    counts = _count_scripts(text)
    total = sum(counts.values())
    if not total:
        return "", 0.0
    # Japanese is partly written in Han characters, while Chinese never uses kana.
    if counts["ja"] * 10 >= counts["zh"] and counts["ja"]:
        counts["ja"] += counts.pop("zh", 0)
    script, num_letters = counts.most_common(1)[0]
    fraction = num_letters / total
    if num_letters < (_MIN_CJK_CHARACTERS if script in ("zh", "ja", "ko") else _MIN_LETTERS):
        return "", 0.0
    if script == "arabic":
        return _detect_arabic_language(text), fraction
    if script not in _LANGUAGES_BY_SCRIPT:
        return script, fraction
    code, confidence = _detect_by_words(unicodedata.normalize("NFC", text), _LANGUAGES_BY_SCRIPT[script])
    return code, confidence * fraction


def _count_scripts(text: str) -> Counter[str]:
    """Count the letters of each script."""
    code_points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
    letters_by_range = np.bincount(
        np.searchsorted(_RANGE_STARTS, code_points, side="right") - 1, minlength=len(_RANGES)
    )
    letters_by_script = np.bincount(_SCRIPT_OF_RANGE, weights=letters_by_range, minlength=len(_SCRIPTS))
    return Counter({script: int(n) for script, n in zip(_SCRIPTS, letters_by_script, strict=True) if script and n})


def _detect_arabic_language(text: str) -> str:
    """Return ur, fa or ar: Urdu and Persian have letters that Arabic lacks, and Urdu some that Persian lacks."""
    if any(letter in text for letter in "ٹڈڑےں"):
        return "ur"
    return "fa" if any(letter in text for letter in "پچژگیک") else "ar"


def _detect_by_words(text: str, codes: list[str]) -> tuple[str, float]:
    """Return the most likely of the language codes and a confidence from 0 to 1; ("", 0.0) if none is likely."""
    text = text.lower().replace("’", "'")
    words = _WORD.findall(text)
    if len(words) < 3:
        return "", 0.0
    scores = dict.fromkeys(codes, 0.0)
    for word, count in Counter(words).items():
        for code in _WORD_LANGUAGES.get(word, ()):
            if code in scores:
                scores[code] += count
    padded = f" {' '.join(words)} "
    for code in codes:
        # A part of a word is weaker evidence than a word.
        scores[code] += 0.4 * sum(map(padded.count, _TYPICAL_PARTS[code].split("|")))
    ranked = sorted(scores, key=lambda code: -scores[code])
    best_score, second_score = scores[ranked[0]], scores[ranked[1]]
    evidence = best_score / len(words)
    # The threshold is a tenth of the words: a list of random English words and a table of names stay below it.
    if evidence < 0.1 or best_score == second_score:
        return "", 0.0
    return ranked[0], (1 - second_score / best_score) * min(1.0, evidence / 0.2)


def count_words(text: str) -> int:
    """Count words between white space; in scripts without spaces, two Han or kana characters or five of Thai count as one."""
    count = len(text.split())
    if text.isascii():
        return count
    ideographs = other_characters = 0
    for ideograph in _UNSPACED.findall(text):
        ideographs += bool(ideograph)
        other_characters += not ideograph
    return count + ideographs // 2 + other_characters // 5
