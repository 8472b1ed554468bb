"""Differences between a source release and an instance's commit: tests that were renamed or removed in between."""

import dataclasses

from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.recipes import recipe_of

_ABSENT = {
    "django__django-11583": (
        "test_watch_with_single_file (utils_tests.test_autoreload.BaseReloaderTests)",
        "test_watch_without_absolute (utils_tests.test_autoreload.BaseReloaderTests)",
        "test_file (utils_tests.test_autoreload.StatReloaderTests)",
    ),
    "django__django-12184": ("test_reverse_value_error_propagates (urlpatterns.tests.ConversionExceptionTests)",),
    "django__django-13033": ("test_order_by_constant_value_without_output_field (ordering.tests.OrderingTests)",),
    "django__django-14534": (
        "test_basic_processing_in_view (forms_tests.tests.test_forms.FormsTestCase)",
        "test_errorlist_override (forms_tests.tests.test_forms.FormsTestCase)",
        "#5749 - `field_name` may be used as a key in _html_output().",
        "BaseForm._html_output() should merge all the hidden input fields and",
        "`css_classes` may be used as a key in _html_output() (class comes",
        "`css_classes` may be used as a key in _html_output() (empty classes).",
        "test_templates_with_forms (forms_tests.tests.test_forms.FormsTestCase)",
    ),
    "django__django-16139": (
        "test_both_passwords (auth_tests.test_forms.UserCreationFormTest)",
        "test_custom_form (auth_tests.test_forms.UserCreationFormTest)",
        "test_custom_form_hidden_username_field (auth_tests.test_forms.UserCreationFormTest)",
        "test_custom_form_with_different_username_field (auth_tests.test_forms.UserCreationFormTest)",
        "test_html_autocomplete_attributes (auth_tests.test_forms.UserCreationFormTest)",
        "test_invalid_data (auth_tests.test_forms.UserCreationFormTest)",
        "test_normalize_username (auth_tests.test_forms.UserCreationFormTest)",
        "test_password_help_text (auth_tests.test_forms.UserCreationFormTest)",
        "test_password_verification (auth_tests.test_forms.UserCreationFormTest)",
        "test_password_whitespace_not_stripped (auth_tests.test_forms.UserCreationFormTest)",
        "test_success (auth_tests.test_forms.UserCreationFormTest)",
        "test_unicode_username (auth_tests.test_forms.UserCreationFormTest)",
        "test_user_already_exists (auth_tests.test_forms.UserCreationFormTest)",
        "UserCreationForm password validation uses all of the form's data.",
        "test_username_field_autocapitalize_none (auth_tests.test_forms.UserCreationFormTest)",
        "test_validates_password (auth_tests.test_forms.UserCreationFormTest)",
    ),
}


def without_absent(instance: Instance) -> Instance:
    """The instance without the PASS_TO_PASS tests that the release lacks, if its image is rebuilt from one."""
    absent = _ABSENT.get(instance.id, ())
    if not absent or recipe_of(instance) is None:
        return instance
    return dataclasses.replace(instance, pass_to_pass=tuple(t for t in instance.pass_to_pass if t not in absent))
