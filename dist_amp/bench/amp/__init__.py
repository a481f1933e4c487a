"""The AMP report: what each precision buys, by experiments of the tutorials' kind, and for a task of your own."""
