"""Names of libraries that nobody maintains any more, mapped onto Tritium (any process). Nothing else imports it."""
