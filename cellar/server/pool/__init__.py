"""Several engines behind one front: who gets a request, and how it goes on when its engine is lost or drains."""
