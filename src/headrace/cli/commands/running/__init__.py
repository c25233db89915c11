"""Commands about runs that go on."""
