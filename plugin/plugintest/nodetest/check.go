package nodetest

// Check ends the test if there is an error. t is a testing.TB or a *rapid.T.
func Check(t interface {
	Helper()
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
