"""The templates that the package ships."""

from gracestream.pipeline.wording.relations import SUBJECT_PLACEHOLDER, relation_templates, template_words


def test_every_template_has_one_place_for_the_subject_and_stands_once_in_its_relation() -> None:
    assert len(relation_templates()) > 100
    for row in relation_templates():
        assert len(row) > 3
        assert len(set(row)) == len(row)
        assert all(one.count(SUBJECT_PLACEHOLDER) == 1 and one.strip() == one for one in row)


def test_usual_words_are_those_of_questions() -> None:
    assert {"where", "born", "capital", "fee"} <= template_words()
