"""Language detection: sentences in many languages; texts too short have no language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.text.languages import LANGUAGES, count_words, detect_language

SENTENCES = {
    "en": "When we came home in the evening, nobody had thought of buying bread for the next day.",
    "de": "Als wir am Abend nach Hause kamen, hatte niemand daran gedacht, für den nächsten Tag Brot zu kaufen.",
    "fr": "Quand nous sommes rentrés le soir, personne n'avait pensé à acheter du pain pour le lendemain.",
    "es": "Cuando llegamos a casa por la noche, nadie había pensado en comprar pan para el día siguiente.",
    "it": "Quando siamo tornati a casa la sera, nessuno aveva pensato di comprare il pane per il giorno dopo.",
    "pt": "Quando chegamos a casa à noite, ninguém tinha pensado em comprar pão para o dia seguinte.",
    "nl": "Toen we 's avonds thuiskwamen, had niemand eraan gedacht om brood voor de volgende dag te kopen.",
    "sv": "När vi kom hem på kvällen hade ingen tänkt på att köpa bröd till nästa dag.",
    "da": "Da vi kom hjem om aftenen, havde ingen tænkt på at købe brød til næste dag, og det var ikke noget nyt.",
    "no": "Da vi kom hjem om kvelden, hadde ingen tenkt på å kjøpe brød til neste dag, og det var ikke noe nytt.",
    "fi": "Kun tulimme illalla kotiin, kukaan ei ollut muistanut ostaa leipää seuraavaksi päiväksi.",
    "pl": "Kiedy wróciliśmy wieczorem do domu, nikt nie pomyślał o tym, żeby kupić chleb na następny dzień.",
    "cs": "Když jsme se večer vrátili domů, nikdo nepomyslel na to, že by měl koupit chleba na další den.",
    "tr": "Akşam eve geldiğimizde, ertesi gün için ekmek almayı hiç kimse düşünmemişti ve bu çok kötü oldu.",
    "ro": "Când am ajuns acasă seara, nimeni nu se gândise să cumpere pâine pentru ziua următoare.",
    "hu": "Amikor este hazaértünk, senki sem gondolt arra, hogy kenyeret vegyen a következő napra.",
    "vi": "Khi chúng tôi về nhà vào buổi tối, không ai nghĩ đến việc mua bánh mì cho ngày hôm sau.",
    "id": "Ketika kami pulang pada malam hari, tidak ada orang yang berpikir untuk membeli roti untuk hari berikutnya.",
    "ru": "Когда мы вечером вернулись домой, никто не подумал о том, чтобы купить хлеб на следующий день.",
    "uk": "Коли ми ввечері повернулися додому, ніхто не подумав про те, щоб купити хліб на наступний день.",
    "bg": "Когато се прибрахме вечерта, никой не беше помислил да купи хляб за следващия ден.",
    "el": "Όταν γυρίσαμε το βράδυ στο σπίτι, κανείς δεν είχε σκεφτεί να αγοράσει ψωμί.",
    "he": "כשחזרנו הביתה בערב, אף אחד לא חשב לקנות לחם ליום המחרת.",
    "ar": "عندما عدنا إلى البيت في المساء لم يفكر أحد في شراء الخبز لليوم التالي.",
    "fa": "وقتی عصر به خانه برگشتیم، هیچ‌کس به فکر خرید نان برای روز بعد نبود.",
    "hi": "जब हम शाम को घर लौटे तो किसी ने अगले दिन के लिए रोटी खरीदने के बारे में नहीं सोचा था।",
    "th": "เมื่อเรากลับถึงบ้านในตอนเย็น ไม่มีใครคิดจะซื้อขนมปังสำหรับวันพรุ่งนี้",
    "ja": "夕方に家へ帰ったとき、誰も翌日のパンを買うことを考えていなかった。",
    "zh": "我们晚上回到家的时候，没有人想到要为第二天买面包。",
    "ko": "저녁에 집에 돌아왔을 때 다음 날 먹을 빵을 사야겠다고 생각한 사람은 아무도 없었다.",
    "ka": "როცა საღამოს სახლში დავბრუნდით, არავის უფიქრია პურის ყიდვაზე.",
}

# The first article of the Universal Declaration of Human Rights, which was not used to write the tables.
RIGHTS = {
    "en": "All human beings are born free and equal in dignity and rights.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren.",
    "sv": "Alla människor är födda fria och lika i värde och rättigheter.",
    "da": "Alle mennesker er født frie og lige i værdighed og rettigheder. De er udstyret med fornuft og samvittighed.",
    "no": "Alle mennesker er født frie og med samme menneskeverd og menneskerettigheter. De er utstyrt med fornuft.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "cs": "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    "ro": "Toate ființele umane se nasc libere și egale în demnitate și în drepturi.",
    "hu": "Minden emberi lény szabadon születik és egyenlő méltósága és joga van.",
    "vi": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.",
    "id": "Semua orang dilahirkan merdeka dan mempunyai martabat dan hak-hak yang sama.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах.",
    "bg": "Всички хора се раждат свободни и равни по достойнство и права.",
}


def test_independent_sentences_are_detected() -> None:
    detected = {code: detect_language(text)[0] for code, text in RIGHTS.items()}
    wrong = {code: language for code, language in detected.items() if language != code}
    assert len(wrong) <= 2, wrong  # Danish and Norwegian hardly differ in a few words.


@pytest.mark.parametrize("code", SENTENCES)
def test_language_of_a_sentence_is_detected(code: str) -> None:
    language, confidence = detect_language(SENTENCES[code])
    assert language == code
    assert 0.1 < confidence <= 1
    assert code in LANGUAGES


@pytest.mark.parametrize(
    "text", ["", "   \n", "Hi", "ok ok", "12345 67890 !!! ---", "你好", "qwrtz plmkn bvcxy wqrtp zzkrt", "\ud800"]
)
def test_texts_too_short_have_no_language(text: str) -> None:
    assert detect_language(text) == ("", 0.0)


def test_mixed_text_has_the_main_language_with_lower_confidence() -> None:
    pure = detect_language(SENTENCES["en"])[1]
    mixed = detect_language(f"{SENTENCES['en']} {SENTENCES['en']} {SENTENCES['de']}")
    assert mixed[0] == "en"
    assert mixed[1] < pure


def test_quotation_in_a_different_script_changes_nothing() -> None:
    assert detect_language(SENTENCES["en"] + " " + SENTENCES["zh"])[0] == "en"
    assert detect_language(SENTENCES["zh"] * 3 + " See the note of the editor.")[0] == "zh"


def test_japanese_is_detected_by_a_little_kana() -> None:
    assert detect_language("東京都知事選挙候補者一覧表を見る")[0] == "ja"
    assert detect_language("東京都知事選挙候補者一覧表")[0] == "zh"


def test_form_of_unicode_and_kind_of_apostrophe_do_not_matter() -> None:
    import unicodedata

    for code in ("vi", "fr", "cs"):
        text = unicodedata.normalize("NFD", SENTENCES[code]).replace("'", "’")
        assert detect_language(text)[0] == code


@given(st.text(max_size=200))
def test_confidence_is_zero_only_without_a_language(text: str) -> None:
    code, confidence = detect_language(text)
    assert code in LANGUAGES | {""}
    assert 0 <= confidence <= 1
    assert (code == "") == (confidence == 0)


def test_words_are_counted_where_there_are_no_spaces() -> None:
    assert count_words("two words") == 2
    assert count_words("") == 0
    assert 8 <= count_words(SENTENCES["zh"]) <= 20
    assert 8 <= count_words(SENTENCES["th"]) <= 25
